"""The engine process's one thread: takes in what the workers ask, computes it in batches on the device, answers.

Greedy and without timers: while a batch is computed the sockets fill, and what they hold by then is the next batch, so
a lone query goes at once and a crowd of workers makes its own batches. Knows nothing of HTTP or documents.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from indexer.errors import DatabaseAway
from models.errors import CareError
from models.spec import Side
from models.tokenizer import flatten
from service.engine import frames
from service.engine.compute import answer_all
from service.engine.cost import CostModel
from service.engine.frames import Answer, Ask, BadFrame, Kind, Status
from service.engine.hub import Connection, Hub
from service.engine.lanes import SLICE_SECONDS, Lanes
from service.engine.protocol import OnBatch
from service.engine.queue import Limits
from service.engine.shelf import Held, Name, Result, Shelf
from service.lifeline import Lifeline

logger = logging.getLogger(__name__)

CHECK_QUERY = "ready"


@dataclass(slots=True, eq=False)
class Waiting:
    """An ask that waits: whom to answer, and from what. It is looked at often, so its measures are taken once."""

    connection: Connection
    ask: Ask
    serving: Held
    size: int = field(init=False)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.ask.size
        self.length = max(self.ask.lengths.tolist(), default=0)

    def is_wanted(self, now: float) -> bool:
        return self.connection.is_open and self.ask.deadline > now


class EngineServer:
    """Serves whoever connects to its listener, until it is told to end, or is alone."""

    def __init__(self, listener: socket.socket, limits: Limits, on_batch: OnBatch) -> None:
        self._on_batch = on_batch
        self._cost = CostModel()
        self._lanes: Lanes[Waiting] = Lanes(limits.batch_queries, limits.batch_tokens)
        self._hub = Hub(listener, self._take_in, self._release_all)
        self._opened: SimpleQueue[Result] = SimpleQueue()
        self._openings: defaultdict[Name, list[tuple[Connection, int]]] = defaultdict(list)
        self._ending = self._alone = False

    def opened(self, result: Result) -> None:
        """Takes a result of the shelf; may be called from any thread."""
        self._opened.put(result)
        self._hub.wake()

    def end(self) -> None:
        """Ends `serve` after the batch at hand; may be called from any thread and from a signal."""
        self._ending = True
        self._hub.wake()

    def end_with(self, supervisor: Lifeline) -> None:
        """Ends `serve` once the supervisor is gone and no worker is left."""
        self._hub.watch(supervisor, self._be_alone)

    def serve(self, shelf: Shelf) -> None:
        self._shelf = shelf
        try:
            while not self._ending and (self._hub.connections or not self._alone):
                self._hub.poll(wait=not len(self._lanes))
                while not self._opened.empty():
                    self._tell_openers(self._opened.get())
                self._run_batch()
        finally:
            self._hub.close()

    def _be_alone(self) -> None:
        self._alone = True

    def _release_all(self, connection: Connection) -> None:
        for handle in connection.handles:
            self._shelf.release(handle)

    def _take_in(self, connection: Connection, body: memoryview) -> None:
        kind = frames.kind_of(body)
        if kind is Kind.ASK:
            self._queue(connection, frames.read_ask(body))
            return
        number, facts = frames.read_control(body)
        if kind is Kind.OPEN:
            self._open(connection, number, facts)
        elif kind is Kind.RELEASE and facts in connection.handles:
            connection.handles.remove(facts)
            self._shelf.release(facts)
        elif kind is Kind.CHECK:
            self._check(connection, number)

    def _queue(self, connection: Connection, ask: Ask) -> None:
        held = self._shelf.get(ask.handle)
        if held is None:
            self._answer(connection, Answer(ask.number, Status.UNKNOWN_SERVING))
        else:
            self._lanes.add([Waiting(connection, ask, held)], bulk=ask.bulk)

    def _check(self, connection: Connection, number: int) -> None:
        """A real query from the newest serving, before all others; nothing to compute where none is open yet."""
        held = self._shelf.newest
        if held is None:
            self._answer(connection, Answer(number, Status.DONE))
            return
        ids, lengths = flatten(held.encoder.reader.tokenize([CHECK_QUERY], Side.QUERY))
        ask = Ask(number, held.handle, k=1, ids=ids, lengths=lengths)
        self._lanes.add([Waiting(connection, ask, held)], first=True)

    def _open(self, connection: Connection, number: int, facts: object) -> None:
        if not isinstance(facts, list) or len(facts) != 2:
            raise BadFrame("a serving is named by a version and a fingerprint")
        name = facts[0], facts[1]
        if (held := self._shelf.find(name)) is not None:
            self._grant(connection, number, held)
        else:
            self._openings[name].append((connection, number))
            self._shelf.open(name)

    def _tell_openers(self, result: Result) -> None:
        opened = self._shelf.put(result)
        if isinstance(opened, Exception) and not isinstance(opened, CareError):
            logger.error("a serving could not be opened", exc_info=opened)
        for connection, number in self._openings.pop(result[0], []):
            if isinstance(opened, Held):
                self._grant(connection, number, opened)
            else:
                said = (type(opened).__name__, str(opened))
                self._hub.send(connection, frames.write_control(Kind.REFUSED, number, said))

    def _grant(self, connection: Connection, number: int, held: Held) -> None:
        if connection.is_open:
            held.holders += 1
            connection.handles.append(held.handle)
            self._hub.send(connection, frames.write_control(Kind.OPENED, number, held.handle))

    def _run_batch(self) -> None:
        batch, dropped = self._lanes.take(time.monotonic(), self._cost.queries(SLICE_SECONDS))
        for late in dropped:
            self._answer(late.connection, Answer(late.ask.number, Status.EXPIRED))
        if not batch:
            return
        began = time.perf_counter()
        answers = self._compute(batch)
        size, seconds = sum(waiting.size for waiting in batch), time.perf_counter() - began
        self._cost.observe(size, seconds)
        written: defaultdict[Connection, list[bytes]] = defaultdict(list)
        for waiting, answer in zip(batch, answers, strict=True):
            written[waiting.connection].append(frames.write_answer(answer))
        for connection, answered in written.items():
            self._hub.send(connection, b"".join(answered))
        self._on_batch(size, seconds, len(self._lanes))

    def _compute(self, batch: Sequence[Waiting]) -> list[Answer]:
        try:
            return answer_all(batch[0].serving, [waiting.ask for waiting in batch], len(self._lanes))
        except DatabaseAway:
            return [Answer(waiting.ask.number, Status.DATABASE_AWAY) for waiting in batch]
        except Exception:
            logger.exception("a batch of %d asks failed", len(batch))
        if len(batch) == 1:
            return [Answer(batch[0].ask.number, Status.FAILED)]
        # One by one: the ask that does the harm is the only one to take it.
        return [self._compute([waiting])[0] for waiting in batch]

    def _answer(self, connection: Connection, answer: Answer) -> None:
        self._hub.send(connection, frames.write_answer(answer))
