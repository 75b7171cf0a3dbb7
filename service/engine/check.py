"""The watchdog's question: does a real query get through the engine process?"""

from __future__ import annotations

import asyncio
from pathlib import Path

from service.engine import frames
from service.engine.frames import FrameReader, Kind, Status


async def check_engine(path: Path) -> bool:
    """Sends a query through the engine behind the socket; False where it fails. Waits as long as the engine takes.

    A database that is away is no fault of the engine's: another engine would not reach it either.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(frames.write_control(Kind.CHECK, 1))
        pieces = FrameReader()
        while data := await reader.read(frames.READ_BYTES):
            for body in pieces.feed(data):
                return frames.read_answer(body).status in (Status.DONE, Status.DATABASE_AWAY)
        return False
    finally:
        writer.close()
