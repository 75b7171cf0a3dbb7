"""One HTTP worker of several: `python -m service.worker`, started by the supervisor, never by hand.

It listens at the address that it shares with its like, and ends when the supervisor tells it to, or is gone. Everything
else is the service as it is alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from argparse import ArgumentParser
from pathlib import Path

from models.errors import CareError
from service.lifeline import Lifeline, Word
from service.listener import join
from service.logs import configure_logging
from service.run import serve_on
from service.runtime import Place
from service.settings import Settings


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="what log lines call it")
    parser.add_argument("--engine", type=Path, help="socket of the engine process, where there is one")
    parser.add_argument("--again", action="store_true", help="it takes the place of a worker that ended")
    arguments = parser.parse_args()
    # A query is tokenised in microseconds; a pool of threads in every worker would only hold memory.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = Settings()
    configure_logging(settings, arguments.name)
    lifeline = Lifeline.inherited()
    supervisor = os.getppid()

    threading.Thread(target=_end_with, args=[lifeline], daemon=True).start()

    def started(line: str) -> None:
        lifeline.say(Word(ready=True, text=line))

    place = Place(arguments.engine, lambda: os.kill(supervisor, signal.SIGHUP), arguments.again)
    try:
        with join(settings.host, settings.port) as listener:
            serve_on(listener, settings, started, place)
    except CareError as error:
        lifeline.say(Word(ready=False, text=str(error)))
        return 1
    return 0


def _end_with(lifeline: Lifeline) -> None:
    """Ends this process as the supervisor would have, once that one is gone; in a thread, to notice it at any time."""
    lifeline.wait()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
