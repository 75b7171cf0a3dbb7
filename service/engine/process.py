"""The engine process: `python -m service.engine.process`, started by the supervisor, never by hand.

It loads the encoder, listens on a Unix socket, and computes for whoever connects, until the supervisor ends it.
"""

from __future__ import annotations

import signal
import socket
import sys
from argparse import ArgumentParser
from pathlib import Path

from models.errors import CareError
from service.engine.devices import open_device
from service.engine.homes import limits_of
from service.engine.server import EngineServer
from service.engine.shelf import Shelf
from service.lifeline import Lifeline, Word
from service.logs import configure_logging
from service.metrics import Metrics
from service.settings import Settings


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="path of the Unix socket to listen on")
    parser.add_argument("--again", action="store_true", help="it takes the place of an engine that ended")
    arguments = parser.parse_args()
    # Ctrl-C reaches every process of the terminal; the workers' last queries are to be answered first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = Settings()
    configure_logging(settings, "engine")
    lifeline = Lifeline.inherited()
    metrics = Metrics()
    if arguments.again:
        metrics.restart("engine")
    try:
        with _bind(arguments.socket) as listener:
            server = EngineServer(listener, limits_of(settings), metrics.batch)
            signal.signal(signal.SIGTERM, lambda number, frame: server.end())
            server.end_with(lifeline)
            device = open_device(settings.device, settings.encoder_threads, settings.threads)
            shelf = Shelf(settings, device, server.opened)
            listener.listen()
            lifeline.say(Word(ready=True, text=""))
            server.serve(shelf)
            shelf.close()
    except CareError as error:
        lifeline.say(Word(ready=False, text=str(error)))
        return 1
    return 0


def _bind(path: Path) -> socket.socket:
    """The socket, bound but not yet listened on; the one of an engine that ended is taken away."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener


if __name__ == "__main__":
    sys.exit(main())
