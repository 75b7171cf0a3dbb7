"""The real engine behind a gate that a test opens and closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import httpx

from service.engine.jobs import Job, Outcome, SearchJob
from service.engine.local import InProcessEngine
from service.serving.serving import Serving

WAIT_SECONDS = 120.0
REAL_RUN = InProcessEngine.run


class Gate:
    """Records the jobs that pass, and holds batches back while it is closed."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.open.set()

    @property
    def queries(self) -> list[str]:
        return [job.query for job in self.jobs if isinstance(job, SearchJob)]

    def run(self, engine: InProcessEngine, serving: Serving, batch: Sequence[Job]) -> list[Outcome]:
        self.jobs += batch
        self.entered.release()
        assert self.open.wait(WAIT_SECONDS)
        return REAL_RUN(engine, serving, batch)


async def until_queued(client: httpx.AsyncClient, queries: int) -> None:
    """Waits until this number of queries is queued for the engine."""
    async with asyncio.timeout(WAIT_SECONDS):
        while f"care_queue_length {queries}.0\n" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)


async def block_engine(gate: Gate, client: httpx.AsyncClient) -> asyncio.Task[httpx.Response]:
    """Closes the gate and sends a request that stays in the engine until the gate opens."""
    while gate.entered.acquire(blocking=False):
        pass
    gate.open.clear()
    task = asyncio.create_task(client.post("/v1/search", json={"query": "held", "timeout_ms": 60_000}))
    await asyncio.to_thread(gate.entered.acquire)
    return task
