"""A contrast stage: queries find their documents. Every stage of the papers but RetroMAE is one, with other settings.

Two encoders, or one for both sides; each is trained or frozen. What a frozen one has to say comes from vectors that
were kept on disk, so that a step costs the trained encoders alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from models.encoder.spec import Side
from models.encoder.torch import TorchEncoder
from models.errors import BadData
from models.progress import Progress
from models.training.batches import Batch, BatchDealer, steps_of
from models.training.encoders import Shelf, blend, trained_weights
from models.training.losses import Contrasted, LexicalTeacher, Objective, with_hypothetical
from models.training.passes import Kept, Passes, Reader, Reading, TokenTable, file_of, kept_in, take
from models.training.ranks import Ranks
from models.training.recipe import Contrast, Data, Recipe
from models.training.rows import as_pairs, as_texts, read_all
from models.training.tables import PairTable, Rows, Texts, shared

OBJECTIVE = "objective"


class ContrastStage:
    """The work of one contrast stage, a step at a time."""

    def __init__(
        self,
        recipe: Recipe,
        stage: Contrast,
        files: list[Path],
        shelf: Shelf,
        vectors: Path,
        ranks: Ranks,
        scratch: Path,
    ) -> None:
        self._recipe, self._stage, self._shelf, self._ranks = recipe, stage, shelf, ranks
        self._vectors, self._scratch = vectors, scratch
        self._document = stage.document or stage.query
        table = read_table(files, stage.data, recipe.seed, scratch, ranks)
        self._token_tables: dict[tuple[str, Side], TokenTable] = {}
        self._kept: dict[tuple[str, Side], Kept] = {}
        self.steps = steps_of(len(table), stage.batch, stage.epochs, stage.steps, recipe.max_steps)
        deal = partial(
            BatchDealer,
            weights=stage.data.weights,
            size=stage.batch,
            steps=self.steps,
            negatives=stage.data.negatives,
            seed=recipe.seed,
            leaf=stage.data.leaf,
            trial=recipe.max_steps is not None,
        )
        drawn, negatives = deal(table).drawn(), stage.data.negatives > 0
        self._table = table.limited_to(drawn, negatives=negatives) if len(drawn) < len(table) else table
        self._prepare_frozen()
        self.encoders = {name: shelf.open(name, trained=True, seed=recipe.seed) for name in dict.fromkeys(stage.train)}
        self._starts = {name: _copy(encoder) for name, encoder in self.encoders.items()} if stage.average < 1 else {}
        self.objective = Objective(stage.loss, recipe.dim).to(ranks.device)
        embeddings = self._kept[self._document, Side.DOCUMENT] if stage.data.leaf else None
        self._dealer = deal(self._table, embeddings=embeddings)
        self._lexical = self._lexical_teacher()
        for name, side in self._parts().values():  # here: millions of texts would make the first step last a minute
            self._tokens(name, side)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """What is trained, by name."""
        return {**self.encoders, OBJECTIVE: self.objective}

    def gradients(self, step: int, scale: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Leaves the gradients of one step in the weights, and says what it saw."""
        batch = self._dealer.deal(step)
        readings = self._readings(batch)
        passes = Passes(
            list(readings.values()),
            self._ranks,
            tokens=self._stage.tokens,
            precision=self._stage.precision,
            seed=self._recipe.seed * 1_000_003 + step,
        )
        passes.forward()
        loss, terms = self.objective(self._contrasted(batch, readings))
        scale(loss).backward()  # type: ignore[no-untyped-call]
        passes.backward()
        facts = {name: float(value) for name, value in {"loss": loss.detach(), **terms}.items()}
        if self._stage.loss.learnable:
            facts["temperature"] = float(torch.as_tensor(self.objective.temperature).detach())
        texts = len(batch.queries) + len(batch.documents)
        return facts | {"texts": texts, "tokens": passes.padded_tokens * self._ranks.size}

    def vectors_of(self, texts: Texts) -> Tensor:
        """Vectors (texts, dim) by the encoder of the texts' side as it is now, for judging."""
        name = self._stage.query if texts.side is Side.QUERY else self._document
        if name not in self.encoders:
            return torch.from_numpy(self._keep(name, texts).astype("float32"))
        encoder = self.encoders[name]
        table = TokenTable.build(texts, encoder.spec, encoder.tokenizer, self._ranks.device)
        return torch.from_numpy(self._reader(encoder).all(table))

    def keep(self, folder: Path) -> None:
        """Writes the trained encoders, averaged with what they were if the recipe wants that."""
        for name, encoder in self.encoders.items():
            if name in self._starts:
                blend(encoder, self._starts[name], self._stage.average)
            self._shelf.keep(name, encoder, folder / name)

    def write(self, folder: Path) -> None:
        """Writes the trained encoders as they are now."""
        for name, encoder in self.encoders.items():
            self._shelf.write(name, encoder, folder / name)

    def _parts(self) -> dict[str, tuple[str, Side]]:
        """Which trained encoder reads each part of a batch, and as which side."""
        parts = {"queries": (self._stage.query, Side.QUERY), "documents": (self._document, Side.DOCUMENT)}
        if len(self._table.hypothetical.values):
            parts["hypothetical"] = (self._stage.query, Side.DOCUMENT)
        return {part: (name, side) for part, (name, side) in parts.items() if name in self.encoders}

    def _readings(self, batch: Batch) -> dict[str, Reading]:
        """What trained encoders read in this step."""
        return {
            part: Reading(self.encoders[name], self._tokens(name, side), rows)
            for part, (name, side) in self._parts().items()
            if len(rows := getattr(batch, part))
        }

    def _contrasted(self, batch: Batch, readings: dict[str, Reading]) -> Contrasted:
        device, settings = self._ranks.device, self._stage.loss
        queries = self._part("queries", self._stage.query, Side.QUERY, batch.queries, readings)
        documents = self._part("documents", self._document, Side.DOCUMENT, batch.documents, readings)
        if len(batch.hypothetical):
            imagined = self._part("hypothetical", self._stage.query, Side.DOCUMENT, batch.hypothetical, readings)
            queries = with_hypothetical(queries, imagined, torch.from_numpy(batch.owners).to(device))
        targets = teacher = lexical = None
        if settings.needs_teacher:
            name = self._teacher_name()
            if settings.mse > 0 or settings.align > 0:
                targets = take(self._kept[name, self._target_side()], batch.queries, device)
            if settings.distil > 0 or settings.false_negative_margin is not None:
                own = take(self._kept[name, Side.QUERY], batch.queries, device)
                teacher = own @ take(self._kept[name, Side.DOCUMENT], batch.documents, device).T
        if self._lexical is not None:
            asked = self._tokens(self._stage.query, Side.QUERY).padded(batch.queries)
            shown = self._tokens(self._stage.query, Side.DOCUMENT).padded(batch.documents)
            lexical = self._lexical.scores(asked, shown)
        others = batch.others(device) if settings.own_negatives else None
        return Contrasted(queries, documents, batch.answers(device), others, targets, teacher, lexical)

    def _part(self, part: str, name: str, side: Side, rows: Rows, readings: dict[str, Reading]) -> Tensor:
        return readings[part].leaf if part in readings else take(self._kept[name, side], rows, self._ranks.device)

    def _prepare_frozen(self) -> None:
        """Has every frozen encoder read what the stage will ask it."""
        stage = self._stage
        wanted = {(stage.query, Side.QUERY), (self._document, Side.DOCUMENT)}
        wanted = {(name, side) for name, side in wanted if name not in stage.train}
        if stage.loss.needs_teacher:
            name = self._teacher_name()
            if stage.loss.mse > 0 or stage.loss.align > 0:
                wanted.add((name, self._target_side()))
            if stage.loss.distil > 0 or stage.loss.false_negative_margin is not None:
                wanted |= {(name, Side.QUERY), (name, Side.DOCUMENT)}
        if stage.data.leaf:
            wanted.add((self._document, Side.DOCUMENT))
        if len(self._table.hypothetical.values) and stage.query not in stage.train:
            wanted.add((stage.query, Side.DOCUMENT))
        for name, side in sorted(wanted):
            self._kept[name, side] = self._keep(name, self._texts(side))

    def _keep(self, name: str, texts: Texts) -> Kept:
        path = file_of(self._vectors, self._shelf.fingerprint(name), texts)
        if path.is_file():
            return kept_in(path, len(texts), self._recipe.dim_of(name))
        encoder = self._shelf.open(name, trained=False)
        place = self._scratch / f"frozen-{path.stem}"
        table = TokenTable.build(texts, encoder.spec, encoder.tokenizer, self._ranks.device, place, self._ranks)
        return self._reader(encoder).keep(table, path)

    def _reader(self, encoder: TorchEncoder) -> Reader:
        return Reader(encoder, self._ranks, tokens=self._stage.tokens, precision=self._stage.precision)

    def _teacher_name(self) -> str:
        """A teacher is an encoder as it was when the stage began."""
        teacher = self._stage.loss.teacher
        return self._stage.query if teacher == "start" else teacher or self._document

    def _target_side(self) -> Side:
        """A teacher reads a text that is its own document as a document, and a query as a query."""
        return Side.DOCUMENT if self._stage.data.view == "texts" else Side.QUERY

    def _texts(self, side: Side) -> Texts:
        return self._table.queries if side is Side.QUERY else self._table.documents

    def _tokens(self, name: str, side: Side) -> TokenTable:
        if (name, side) not in self._token_tables:
            encoder = self.encoders[name]
            place, device = self._scratch / f"{name}-{side}", self._ranks.device
            table = TokenTable.build(self._texts(side), encoder.spec, encoder.tokenizer, device, place, self._ranks)
            self._token_tables[name, side] = table
        return self._token_tables[name, side]

    def _lexical_teacher(self) -> LexicalTeacher | None:
        settings = self._stage.loss
        if settings.distil == 0 or settings.lexical_share == 0:
            return None
        return LexicalTeacher.fit(self._tokens(self._stage.query, Side.DOCUMENT), seed=self._recipe.seed)


def read_table(files: list[Path], data: Data, seed: int, folder: Path, ranks: Ranks) -> PairTable:
    """The stage's rows, as pairs or as texts: read by the first rank into the folder, and mapped by all."""

    def build() -> PairTable:
        rows = Progress(f"read {', '.join(map(str, files))}", "rows").over(read_all(files))
        if data.view == "texts":
            return PairTable.of_texts(as_texts(rows, data.crops, seed, sentences=data.sentences), folder)
        return PairTable.of_pairs(as_pairs(rows, data.crops, seed), folder=folder)

    table = shared(folder, ranks, build)
    for key, named in (("weights", data.weights), ("crops", data.crops)):
        table.check_sources(f"data.{key}", [source for source in named if source != "*"])
    if data.negatives and not len(table.negatives.values):
        raise BadData(f"data.negatives is {data.negatives}, but no row has neg: mine some (kind mine), or set it to 0")
    return table


def _copy(encoder: TorchEncoder) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trained_weights(encoder).items()}
