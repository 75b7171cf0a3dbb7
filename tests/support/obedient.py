"""A process that follows a script, a file of lines: each start takes the next line, and the last line repeats.

Commands are `say TEXT`, `refuse TEXT`, `crash` and `hang` (without a message). With `and stay` the process stays alive.
With the text `deaf` it ignores SIGTERM.
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
    from service.processes.startup import StartupMessage, SupervisorPipe  # takes a while, during which it may be killed

    pipe = SupervisorPipe.inherited()
    pipe.send(StartupMessage(ready=verb == "say", text=text))
    while line.endswith(" and stay"):
        time.sleep(60)


if __name__ == "__main__":
    main()
