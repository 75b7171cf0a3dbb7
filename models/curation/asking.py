"""Base of the curation steps that ask language models about rows."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul
from pathlib import Path
from typing import Any, ClassVar

from models.curation.frame import Outcome, Step, Tally, digest
from models.curation.panel import Limits, Model, Panel, Reply, Request
from models.curation.rows import Row
from models.errors import CareError
from models.prompts import LANGUAGE, load

PASSAGE_CHARACTERS = 2000


def shortened(text: str, characters: int = PASSAGE_CHARACTERS) -> str:
    """The beginning of a text in one line, as a prompt shows it."""
    return " ".join(text[:characters].split())


Answered = tuple[Row, Sequence[Sequence[Reply]], Counter[str]]
"""A row, the replies of every model to each of its requests, and what they cost."""


@dataclass(frozen=True)
class AskingStep(Step):
    """A step that puts rows to language models: several rows at a time, outcomes in the order of the rows."""

    models: Sequence[Model]
    answers: Path
    """The file that keeps every answer."""
    language: str = field(default=LANGUAGE, kw_only=True)
    limits: Limits = field(default=Limits(), kw_only=True)

    forms: ClassVar[Sequence[str]] = ()
    """Names of other files that requests are made of; their texts are part of the prompt's hash."""

    def __post_init__(self) -> None:
        if len({model.name for model in self.models}) < len(self.models):
            raise CareError("a model is named twice; name different ones, or serve one under two names")

    @property
    @abstractmethod
    def template(self) -> str:
        """The name of the prompt; its hash is part of every row's provenance."""

    @cached_property
    def prompt(self) -> str:
        return load(self.template, self.language)

    @cached_property
    def reminder(self) -> str:
        """The message that follows an unusable answer."""
        return load("reminder", self.language)

    def parameters(self) -> dict[str, Any]:
        names = [model.name for model in self.models]
        texts = [self.prompt, self.reminder, *(load(name, self.language) for name in self.forms)]
        return {"models": names, "prompt": digest(texts), "max_tokens": self.limits.max_tokens}

    @abstractmethod
    def requests(self, row: Row) -> Sequence[Request]:
        """Returns the requests for a row; none for one that `decide` drops at once."""

    @abstractmethod
    def decide(self, row: Row, replies: Sequence[Sequence[Reply]], notes: Counter[str]) -> Outcome:
        """Returns the outcome of a row, from the replies of every model to each of its requests."""

    def decide_all(self, answered: Sequence[Answered]) -> list[Outcome]:
        """The outcomes of a block of rows."""
        return [self.decide(*each) for each in answered]

    def facts(self, tally: Tally) -> dict[str, Any]:
        """Returns the cost of this output's answers if prices are known, also of those that an earlier run paid for."""
        costs = {}
        for model in self.models:
            if model.price:
                tokens = (tally.notes[f"{kind} tokens of {model.name}"] for kind in ("prompt", "completion"))
                costs[model.name] = sum(map(mul, tokens, model.price)) / 1e6
        return {"cost": costs} if costs else {}

    def provenance(self) -> dict[str, Any]:
        own = self.parameters()
        return {**super().provenance(), "prompt": own["prompt"], "models": own["models"]}

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        panel = Panel(self.models, self.answers, self.limits)
        waiting: deque[tuple[Row, list[tuple[Request, list[Future[Reply]]]]]] = deque()
        try:
            for row in rows:
                waiting.append((row, [(request, panel.submit(request)) for request in self.requests(row)]))
                if len(waiting) >= 2 * self.limits.at_once + self.block:
                    yield from self.decide_all([self._wait_for(*waiting.popleft(), panel) for _ in range(self.block)])
            while waiting:
                some = range(min(self.block, len(waiting)))
                yield from self.decide_all([self._wait_for(*waiting.popleft(), panel) for _ in some])
        finally:
            panel.close()

    def _wait_for(self, row: Row, asked: Sequence[tuple[Request, list[Future[Reply]]]], panel: Panel) -> Answered:
        replies, notes = list[list[Reply]](), Counter[str]()
        for request, futures in asked:
            replies.append([future.result() for future in futures])
            panel.forget(request)
        for model, of_model in zip(self.models, zip(*replies, strict=True), strict=False):
            notes[f"requests to {model.name}"] += sum(reply.requests for reply in of_model)
            notes[f"prompt tokens of {model.name}"] += sum(reply.prompt_tokens for reply in of_model)
            notes[f"completion tokens of {model.name}"] += sum(reply.completion_tokens for reply in of_model)
        return row, replies, notes
