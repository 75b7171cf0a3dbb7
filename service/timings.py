"""The stages of a request, each timed once: metrics, header and answer show the same numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from service.engine.jobs import BatchTimes


@dataclass(slots=True)
class Timings:
    """Seconds per stage of one request.

    `queue` is all the time between handing over and getting back that the request's own batches did not spend, the
    way to the engine's thread and back included; so the stages add up to what the client waited for.
    """

    tokenize: float = 0.0
    queue: float = 0.0
    encode: float = 0.0
    search: float = 0.0
    fetch: float = 0.0
    total: float = 0.0

    def add_engine(self, waited_seconds: float, batches: Iterable[BatchTimes]) -> None:
        """Splits the wait for the engine: queries that shared a batch count its time once."""
        distinct = {id(times): times for times in batches}.values()
        # A query that joined a batch under way waited for its end only, and the end is the search.
        self.search = min(waited_seconds, sum(times.search_seconds for times in distinct))
        self.encode = min(waited_seconds - self.search, sum(times.encode_seconds for times in distinct))
        self.queue = waited_seconds - self.search - self.encode

    def as_json(self) -> bytes:
        """The answer's `timings_ms`: milliseconds, three decimals."""
        return _JSON % self._milliseconds()

    def as_server_timing(self) -> bytes:
        """The header of the same name, with the same numbers."""
        return _SERVER_TIMING % self._milliseconds()

    def _milliseconds(self) -> tuple[float, ...]:
        return (
            self.tokenize * 1000,
            self.queue * 1000,
            self.encode * 1000,
            self.search * 1000,
            self.fetch * 1000,
            self.total * 1000,
        )


STAGES = tuple(stage.name for stage in fields(Timings))
# Put together once: these two lines are written for every request.
_JSON = ("{" + ",".join(f'"{stage}":%.3f' for stage in STAGES) + "}").encode()
_SERVER_TIMING = ", ".join(f"{stage};dur=%.3f" for stage in STAGES).encode()
