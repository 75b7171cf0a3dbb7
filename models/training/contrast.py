"""Contrast stage: queries learn to find their documents. Every stage of the papers but RetroMAE is one.

Two encoders, or one for both sides; each is trained or frozen. Vectors of frozen encoders are read once and kept on
disk, so that a step costs the trained encoders alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from models.encoder.packed.kernels import send
from models.encoder.spec import Side
from models.training.adapters import blend, trained_weights
from models.training.batches import Batch
from models.training.encoders import EncoderStore
from models.training.kept import Kept
from models.training.losses import Contrasted, LexicalTeacher, Objective, with_hypothetical
from models.training.monitor import DevSets
from models.training.passes import Passes, Reading, TokenTable, on_device, packs, take
from models.training.stages import Contrast
from models.training.texts import Rows, Texts
from models.training.vectors import Reader, fit_projection, read_once, spread
from models.training.work import Work, read_table

OBJECTIVE = "objective"
# Queries by whose vectors hubs are known.
HUB_QUERIES = 8192


class ContrastStage(Work):
    """The work of one contrast stage, a step at a time."""

    _stage: Contrast

    def __init__(self, store: EncoderStore, stage: Contrast, files: list[Path], scratch: Path) -> None:
        recipe, ranks, data = store.recipe, store.ranks, stage.data
        super().__init__(store, stage, read_table(files, data, recipe.seed, scratch, ranks), scratch)
        self._document = stage.document or stage.query
        self._token_tables: dict[tuple[str, Side], TokenTable] = {}
        self._kept = {key: self._keep(key[0], self._texts(key[1])) for key in sorted(self._frozen())}
        self._vectors = {key: on_device(kept, ranks.device) for key, kept in self._kept.items()}
        self.encoders = {name: store.open(name, trained=True) for name in dict.fromkeys(stage.train)}
        self._packs = {name: packs(encoder, ranks.device, stage.precision) for name, encoder in self.encoders.items()}
        self.objective = Objective(stage.loss, recipe.dim_of(stage.query)).to(ranks.device)
        embeddings = self._kept[self._document, Side.DOCUMENT] if data.leaf else None
        self._dealer = self._deal(self._table, embeddings=embeddings)
        uses_bm25 = stage.loss.distil > 0 and stage.loss.lexical_share > 0
        documents = self._tokens(stage.query, Side.DOCUMENT) if uses_bm25 else None
        self._lexical = None if documents is None else LexicalTeacher.fit(documents, seed=recipe.seed)
        for name, side in self._parts().values():  # here: millions of texts would make the first step last a minute
            self._tokens(name, side)
        if stage.query in stage.train and stage.loss.needs_targets and store.has_new_projection(stage.query):
            reader = Reader(self.encoders[stage.query], ranks, tokens=stage.tokens, precision=stage.precision)
            targets = self._vectors[stage.teacher, self._target_side()]
            fit_projection(reader, self._tokens(stage.query, Side.QUERY), targets)
        self._starts = {  # with the projection as it was fitted: a new one is random before
            name: {key: value.clone() for key, value in trained_weights(encoder).items()}
            for name, encoder in self.encoders.items()
            if stage.average < 1
        }

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {**self.encoders, OBJECTIVE: self.objective}

    def gradients(self, step: int, scale: Callable[[Tensor], Tensor]) -> dict[str, float | Tensor]:
        stage, batch = self._stage, self._dealer.deal(step)
        readings = {
            part: Reading(self.encoders[name], self._tokens(name, side), rows, self._packs[name])
            for part, (name, side) in self._parts().items()
            if len(rows := getattr(batch, part))
        }
        seed = self._store.recipe.seed * 1_000_003 + step
        every = list(readings.values())
        passes = Passes(every, self._ranks, tokens=stage.tokens, precision=stage.precision, seed=seed)
        passes.forward()
        loss, terms = self.objective(self._contrasted(batch, readings))
        scale(loss).backward()  # type: ignore[no-untyped-call]
        passes.backward()
        facts: dict[str, float | Tensor] = {"loss": loss.detach(), **terms}
        if stage.loss.learnable:
            facts["temperature"] = torch.as_tensor(self.objective.temperature).detach()
        texts = len(batch.queries) + len(batch.documents)
        return facts | {"texts": texts, "tokens": passes.tokens * self._ranks.size}

    def vectors_of(self, texts: Texts) -> Tensor:
        """Returns vectors (texts, dim) by the encoder of the texts' side as it is now, for judging."""
        name, stage = self._stage.query if texts.side is Side.QUERY else self._document, self._stage
        if name not in self.encoders:
            return torch.from_numpy(np.asarray(self._keep(name, texts), dtype=np.float32))
        return Reader(self.encoders[name], self._ranks, tokens=stage.tokens, precision=stage.precision).read(texts)

    def figure(self, dev: DevSets) -> float:
        return dev.figure(self.vectors_of)

    def keep(self, folder: Path) -> None:
        """Writes the trained encoders, averaged with what they were if the recipe says so."""
        for name, start in self._starts.items():
            blend(self.encoders[name], start, self._stage.average)
        super().keep(folder)
        if self._stage.query in self._store.recipe.folded:
            queries, documents = self._table.queries, self._kept[self._document, Side.DOCUMENT]
            asked = queries.take(spread(len(queries), HUB_QUERIES)).texts
            self._store.keep_sample(asked, documents[spread(len(documents), HUB_QUERIES)])

    def _parts(self) -> dict[str, tuple[str, Side]]:
        """Returns which trained encoder reads each part of a batch, and as which side."""
        parts = {"queries": (self._stage.query, Side.QUERY), "documents": (self._document, Side.DOCUMENT)}
        if len(self._table.hypothetical.values):
            parts["hypothetical"] = (self._stage.query, Side.DOCUMENT)
        return {part: (name, side) for part, (name, side) in parts.items() if name in self.encoders}

    def _contrasted(self, batch: Batch, readings: dict[str, Reading]) -> Contrasted:
        device, query, settings = self._ranks.device, self._stage.query, self._stage.loss

        def vectors(part: str, name: str, side: Side, rows: Rows) -> Tensor:
            return readings[part].leaf if part in readings else take(self._vectors[name, side], rows, device)

        queries = vectors("queries", query, Side.QUERY, batch.queries)
        documents = vectors("documents", self._document, Side.DOCUMENT, batch.documents)
        if len(batch.hypothetical):
            imagined = vectors("hypothetical", query, Side.DOCUMENT, batch.hypothetical)
            queries = with_hypothetical(queries, imagined, send(batch.owners, device))
        targets = teacher = lexical = None
        if settings.needs_targets:
            targets = take(self._vectors[self._stage.teacher, self._target_side()], batch.queries, device)
        if settings.needs_scores:
            own = take(self._vectors[self._stage.teacher, Side.QUERY], batch.queries, device)
            teacher = own @ take(self._vectors[self._stage.teacher, Side.DOCUMENT], batch.documents, device).T
        if self._lexical is not None:
            asked = self._tokens(query, Side.QUERY).padded(batch.queries)
            lexical = self._lexical.scores(asked, self._tokens(query, Side.DOCUMENT).padded(batch.documents))
        others = batch.others(device) if settings.own_negatives else None
        return Contrasted(queries, documents, batch.answers(device), others, targets, teacher, lexical)

    def _frozen(self) -> set[tuple[str, Side]]:
        """Returns which frozen encoder reads which side before the first step."""
        stage = self._stage
        wanted = {(stage.query, Side.QUERY), (self._document, Side.DOCUMENT)}
        if len(self._table.hypothetical.values):
            wanted.add((stage.query, Side.DOCUMENT))
        wanted = {(name, side) for name, side in wanted if name not in stage.train}
        if stage.loss.needs_targets:
            wanted.add((stage.teacher, self._target_side()))
        if stage.loss.needs_scores:
            wanted |= {(stage.teacher, Side.QUERY), (stage.teacher, Side.DOCUMENT)}
        return wanted | ({(self._document, Side.DOCUMENT)} if stage.data.leaf else set())

    def _keep(self, name: str, texts: Texts) -> Kept:
        return read_once(name, texts, self._store, self._scratch, self._stage.tokens, self._stage.precision)

    def _target_side(self) -> Side:
        """Returns how the teacher reads: a text that is its own document as a document, a query as a query."""
        return Side.DOCUMENT if self._stage.data.view == "texts" else Side.QUERY

    def _texts(self, side: Side) -> Texts:
        return self._table.queries if side is Side.QUERY else self._table.documents

    def _tokens(self, name: str, side: Side) -> TokenTable:
        if (name, side) not in self._token_tables:
            spec, tokenizer = self.encoders[name].spec, self.encoders[name].tokenizer
            place = self._scratch / f"{name}-{side}"
            texts = self._store.asked_of(name, self._texts(side))
            table = TokenTable.build(texts, spec, tokenizer, self._ranks, place)
            self._token_tables[name, side] = table
        return self._token_tables[name, side]
