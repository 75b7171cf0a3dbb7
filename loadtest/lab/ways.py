"""Serves several configurations from one process, each on its own port, for `make bench-keys`.

Two processes of one program differ by up to 12 % for as long as they live, which is more than the limit that is
measured. Configurations in one process do not. Each argument is the settings of one configuration, as JSON; the
environment has the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
from socket import create_server

import uvicorn
import uvloop

from service.http.app import create_app
from service.http.protocol import http_config
from service.settings import Settings


async def serve(ways: list[Settings]) -> None:
    """Serves until SIGTERM, which each server passes on to the one before it."""
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for settings in ways:
            app = create_app(settings)
            await stack.enter_async_context(app.router.lifespan_context(app))
            servers.append(
                uvicorn.Server(http_config(app, settings)).serve([create_server((settings.host, settings.port))])
            )
        gc.collect()
        gc.freeze()  # as `care serve` does
        await asyncio.gather(*servers)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve([Settings(**json.loads(given)) for given in sys.argv[1:]]))
