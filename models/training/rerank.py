"""Rerank stage: a cross-encoder learns to rank a query's answer before the other documents of a list.

A list is a positive and its negatives, labelled or mined. Queries and documents are tokenised once and joined on the
training device. Groups of whole lists that fit `tokens` are read one after the other; their gradients add up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.encoder.packed.kernels import send
from models.encoder.tokenizer import Tokenizer
from models.encoder.torch_reranker import TorchReranker
from models.lexical import Ranking
from models.training.batches import Batch
from models.training.encoders import EncoderStore
from models.training.kept import Kept
from models.training.losses import distillation
from models.training.monitor import DevSets
from models.training.passes import PARTS, Padded, TokenTable, autocast, chunks_of, on_device, take
from models.training.stages import Rerank
from models.training.tables import Ragged
from models.training.texts import Rows
from models.training.vectors import read_once
from models.training.work import Work, read_table

NONE = -1
"""In a list: no document at this place."""
# The score of a place without a document: its share of a softmax is 0, and so is its part of a divergence.
NO_SCORE = -1e4


class RerankStage(Work):
    """The work of one rerank stage, a step at a time."""

    _stage: Rerank

    def __init__(self, store: EncoderStore, stage: Rerank, files: list[Path], scratch: Path) -> None:
        ranks, data = store.ranks, stage.data
        super().__init__(store, stage, read_table(files, data, store.recipe.seed, scratch, ranks), scratch)
        self._size = 1 + data.negatives
        self._found: list[list[Ranking]] | None = None
        self._dealer = self._deal(self._table)
        self._reranker = reranker = store.open_reranker(stage.encoder)
        longest = reranker.spec.max_length
        shorter, whole = (Tokenizer.from_json(reranker.tokenizer_json, cut) for cut in (longest // 2, longest))
        sides = ((self._table.queries, shorter), (self._table.documents, whole))
        self._queries, self._documents = (
            TokenTable.build(texts, None, tokenizer, ranks, scratch / f"tokens-{texts.side}")
            for texts, tokenizer in sides
        )
        self._teacher: list[Kept | Tensor] = []
        if stage.loss.distil and stage.loss.teacher:
            kept = (read_once(stage.loss.teacher, texts, store, scratch) for texts, _ in sides)
            self._teacher = [on_device(vectors, ranks.device) for vectors in kept]

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {self._stage.encoder: self._reranker}

    def gradients(self, step: int, scale: Callable[[Tensor], Tensor]) -> dict[str, float]:
        batch, recipe = self._dealer.deal(step), self._store.recipe
        lists = draw_lists(batch, self._table.answers, self._size, np.random.default_rng([recipe.seed, 3, step]))
        torch.manual_seed(self._ranks.seed(recipe.seed, step))
        sums, tokens = torch.zeros(3, device=self._ranks.device), 0
        own = self._ranks.share(len(lists))
        for group in self._groups(batch.queries[own], lists[own]):
            queries, documents = batch.queries[own][group], lists[own][group]
            scores, padded = self._scores(queries, documents)
            terms = self._terms(scores, queries, documents) / len(lists)
            scale(terms[0]).backward()  # type: ignore[no-untyped-call]
            sums += terms.detach()
            tokens += padded
        loss, cross_entropy, distil = self._ranks.sum(sums).tolist()
        facts = {"loss": loss, "cross_entropy": cross_entropy} | ({"distil": distil} if self._teacher else {})
        return facts | {"texts": int((lists != NONE).sum()), "tokens": tokens * self._ranks.size}

    def figure(self, dev: DevSets) -> float:
        """Returns the metric of the first encoder's rankings after reranking; the first call prints theirs, too."""
        shown = self._found is not None
        if self._found is None:
            first = str(self._stage.first)
            self._found = dev.rankings(
                lambda texts: torch.from_numpy(
                    np.asarray(read_once(first, texts, self._store, self._scratch), dtype=np.float32)
                )
            )
        self._reranker.eval()
        before, after = dev.reranked(self._found, self._reranker, self._stage.depth)
        self._reranker.train()
        if not shown and self._ranks.is_first:
            print(f"{self._stage.first} alone: {dev.metric} {before:.2f}", file=sys.stderr)
        return after

    def _groups(self, queries: Rows, lists: Rows) -> Iterator[Rows]:
        """Yields positions of lists whose pairs, padded to the longest of them, fit into the stage's tokens."""
        longest = np.where(lists == NONE, 0, self._documents.lengths[lists]).max(1) + self._queries.lengths[queries]
        per_list = np.minimum(longest, self._reranker.spec.max_length) * lists.shape[1]
        yield from chunks_of(per_list, self._stage.tokens)

    def _scores(self, queries: Rows, lists: Rows) -> tuple[Tensor, int]:
        """Returns scores (lists, size) with their graphs, and the padded tokens that they took."""
        places, spec = np.argwhere(lists != NONE), self._reranker.spec
        asked, found = queries[places[:, 0]], lists[places[:, 0], places[:, 1]]
        lengths = np.minimum(self._queries.lengths[asked] + self._documents.lengths[found], spec.max_length)
        flat, tokens = torch.zeros(len(places), device=self._ranks.device), 0
        for chunk in chunks_of(lengths, max(1, self._stage.tokens // PARTS)):
            ids, mask = join(self._queries, self._documents, asked[chunk], found[chunk], self._reranker)
            with autocast(self._ranks.device, self._stage.precision):
                scores = self._reranker(ids, mask)
            flat = flat.index_put((send(chunk, flat.device),), scores)
            tokens += ids.numel()
        whole = torch.full(lists.shape, NO_SCORE, device=self._ranks.device)
        rows, columns = (send(part.copy(), whole.device) for part in places.T)
        return whole.index_put((rows, columns), flat), tokens

    def _terms(self, scores: Tensor, queries: Rows, lists: Rows) -> Tensor:
        """Returns the weighted loss, cross-entropy and divergence, each summed over the lists."""
        settings = self._stage.loss
        first = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
        cross_entropy = functional.cross_entropy(scores, first, reduction="sum")
        distil = torch.zeros((), device=scores.device)
        if self._teacher:
            distil = len(lists) * distillation(scores, self._taught(queries, lists), 1.0, settings.teacher_temperature)
        return torch.stack([settings.cross_entropy * cross_entropy + settings.distil * distil, cross_entropy, distil])

    def _taught(self, queries: Rows, lists: Rows) -> Tensor:
        """Returns the teacher's cosines (lists, size)."""
        device = self._ranks.device
        asked = take(self._teacher[0], queries, device)
        found = take(self._teacher[1], np.maximum(lists, 0).ravel(), device).view(*lists.shape, -1)
        cosines = torch.einsum("ld,lsd->ls", asked, found)
        return cosines.masked_fill(send(lists == NONE, device), NO_SCORE)


def draw_lists(batch: Batch, answers: Ragged, size: int, chance: np.random.Generator) -> Rows:
    """Document rows (queries, size): the positive, its hard negatives, then positives of others; NONE if none is left.

    No other answer of a query is in its list.
    """
    count = len(batch.queries)
    lists = np.full((count, size), NONE, dtype=np.int64)
    positives = batch.documents[:count]
    for place, query in enumerate(batch.queries):
        hard = batch.drawn[1][batch.drawn[0] == place]
        others = positives[chance.permutation(count)[: 2 * size]]
        wrong = dict.fromkeys([*hard.tolist(), *others.tolist()])
        for answer in answers[int(query)].tolist():
            wrong.pop(answer, None)
        chosen = [int(positives[place]), *wrong][:size]
        lists[place, : len(chosen)] = chosen
    return lists


def join(queries: TokenTable, documents: TokenTable, asked: Rows, found: Rows, reranker: TorchReranker) -> Padded:
    """Returns ids and mask of pairs, as `PairTokenizer.join` makes them of single texts."""
    device, extra = queries.device, reranker.spec.separators - 1
    first, first_mask = queries.padded(asked)
    second, second_mask = documents.padded(found)
    starts = first_mask.sum(1) + extra
    # The document comes without its first token.
    totals = torch.minimum(starts + second_mask.sum(1) - 1, torch.tensor(reranker.spec.max_length, device=device))
    columns = torch.arange(int(totals.max()), device=device).expand(len(asked), -1)
    mask = columns < totals[:, None]
    from_query = first.gather(1, columns.clamp(max=first.shape[1] - 1))
    places = (columns - starts[:, None] + 1).clamp(0, second.shape[1] - 1)
    ids = torch.where(columns < starts[:, None] - extra, from_query, second.gather(1, places))
    between = (columns >= starts[:, None] - extra) & (columns < starts[:, None])
    ids = torch.where(between | (columns == totals[:, None] - 1), reranker.separator, ids)
    return torch.where(mask, ids, 0), mask.long()
