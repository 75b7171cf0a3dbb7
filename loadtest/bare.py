"""The baseline of the benchmark: FastAPI and uvicorn with the service's settings, answering a constant.

`python -m loadtest.bare --port PORT --bytes N` runs until SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import uvicorn
from fastapi import FastAPI, Response

from loadtest.harness import HOST, PATH, READY


def create_app(size: int) -> FastAPI:
    """A route at the path of the search that answers `size` bytes to every request."""
    app = FastAPI(openapi_url=None)
    body = b"x" * size

    @app.post(PATH)
    async def answer() -> Response:
        return Response(body, media_type="application/json")

    @app.get(READY)
    async def ready() -> Response:
        return Response()

    return app


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.bare", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True, help="size of the answer")
    given = parser.parse_args(arguments)
    # The same options as `care serve` gives; one worker is uvicorn's default.
    uvicorn.run(
        create_app(given.bytes),
        host=HOST,
        port=given.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
