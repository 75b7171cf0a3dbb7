"""A process that does what its test told it in a file, line by line: one line a start, the last one for all others.

`say TEXT`, `refuse TEXT`, `crash`, `hang` (and say nothing); it lives on where it says `and stay`. Who says `deaf` does
not end when asked to.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    plan = Path(sys.argv[1])
    starts = plan.with_suffix(".starts")
    with starts.open("a") as file:
        file.write(" ".join(sys.argv[2:]) + "\n")
    lines = plan.read_text().splitlines()
    line = lines[min(len(starts.read_text().splitlines()), len(lines)) - 1]
    verb, _, text = line.removesuffix(" and stay").partition(" ")
    if text == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if verb == "crash":
        os._exit(3)
    while verb == "hang":
        time.sleep(60)
    from service.processes.startup import StartupMessage, SupervisorPipe  # takes a while, in which it might be killed

    pipe = SupervisorPipe.inherited()
    pipe.send(StartupMessage(ready=verb == "say", text=text))
    while line.endswith(" and stay"):
        time.sleep(60)


if __name__ == "__main__":
    main()
