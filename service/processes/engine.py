"""Entry point of the engine process, `python -m service.processes.engine`; the supervisor starts it."""

from __future__ import annotations

import signal
import socket
import sys
from argparse import ArgumentParser
from pathlib import Path

from models.errors import CareError
from service.engine.device import Cpu, Device
from service.engine.queue import Limits
from service.engine.remote.server import EngineServer, OpenServings
from service.metrics import Metrics
from service.processes.startup import StartupMessage, SupervisorPipe, configure_logging
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
    pipe = SupervisorPipe.inherited()
    metrics = Metrics()
    if arguments.again:
        metrics.restart("engine")
    # The socket of an engine that ended is still there.
    arguments.socket.unlink(missing_ok=True)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(arguments.socket))
            server = EngineServer(listener, Limits.from_settings(settings), metrics.batch)
            signal.signal(signal.SIGTERM, lambda number, frame: server.end())
            device: Device
            if settings.device == "cuda":
                from service.engine.cuda import Cuda, watch_memory  # needs the gpu extra

                device = Cuda()
                watch_memory(metrics.card)
            else:
                device = Cpu(settings.encoder_threads, settings.threads)
            servings = OpenServings(settings, device)
            listener.listen()
            pipe.send(StartupMessage(ready=True, text=""))
            server.serve(servings, pipe)
            servings.close()
    except CareError as error:
        pipe.send(StartupMessage(ready=False, text=str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
