"""Generate stage: a causal language model learns to write hypothetical documents for a query (SL-HyDE, section 3.2).

The prompt is the one that HyDE asks with, in the model's own chat template. Only the tokens of the answer, its end
included, count in the loss. Prompts and answers are tokenised once, apart, as a server sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from models.encoder.torch_generator import TorchGenerator
from models.errors import BadData
from models.progress import Progress
from models.prompts import ask_for_document
from models.rows import Pair, read_all
from models.training.encoders import EncoderStore
from models.training.losses import reconstruction
from models.training.passes import TokenTable, autocast, chunks_of
from models.training.rows import without
from models.training.stages import Generate
from models.training.tables import PairTable, shared
from models.training.texts import Rows
from models.training.work import Work, check_shares


class GenerateStage(Work):
    """The work of one generate stage, a step at a time."""

    _stage: Generate

    def __init__(self, store: EncoderStore, stage: Generate, files: list[Path], scratch: Path) -> None:
        ranks = store.ranks
        self._generator = generator = store.open_generator(stage.encoder)
        left_out = stage.data.without
        table = shared(scratch, ranks, lambda: PairTable.of_pairs(chats(files, generator, left_out), folder=scratch))
        check_shares(table, stage.data)
        super().__init__(store, stage, table, scratch)
        self._dealer = self._deal(self._table)
        tokenizer = generator.plain_tokenizer
        self._prompts, self._answers = (
            TokenTable.build(texts, None, tokenizer, ranks, scratch / f"tokens-{texts.side}")
            for texts in (self._table.queries, self._table.documents)
        )
        if (longest := int(self._prompts.lengths.max())) >= generator.max_length:
            raise BadData(
                f"a prompt of {longest} tokens leaves no room for an answer: raise encoders.{stage.encoder}.max_length "
                f"({generator.max_length}), or leave long queries out"
            )

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {self._stage.encoder: self._generator}

    def gradients(self, step: int, scale: Callable[[Tensor], Tensor]) -> dict[str, float]:
        batch = self._dealer.deal(step)
        torch.manual_seed(self._ranks.seed(self._store.recipe.seed, step))
        prompts = self._prompts.lengths[batch.queries]
        lengths = np.minimum(prompts + self._answers.lengths[batch.documents], self._generator.max_length)
        answered, total, tokens = int((lengths - prompts).sum()), torch.zeros((), device=self._ranks.device), 0
        own = self._ranks.share(len(lengths))
        for chunk in chunks_of(lengths[own], self._stage.tokens):
            rows = own[chunk]
            ids, written = self._join(batch.queries[rows], batch.documents[rows])
            with autocast(self._ranks.device, self._stage.precision):
                states = self._generator.states(ids)
                # A state names the token after it.
                loss = reconstruction(states[:, :-1], self._generator.vocabulary, ids[:, 1:], written[:, 1:]) / answered
            scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            tokens += ids.numel()
        loss_of_batch = float(self._ranks.sum(total))
        return {"loss": loss_of_batch, "texts": len(lengths), "tokens": tokens * self._ranks.size}

    def _join(self, prompts: Rows, answers: Rows) -> tuple[Tensor, Tensor]:
        """Ids of prompts with their answers, padded on the right, and which of them are the answers'."""
        first, first_mask = self._prompts.padded(prompts)
        second, second_mask = self._answers.padded(answers)
        starts = first_mask.sum(1, keepdim=True)
        totals = (starts + second_mask.sum(1, keepdim=True)).clamp(max=self._generator.max_length)
        columns = torch.arange(int(totals.max()), device=first.device).expand(len(first), -1)
        from_prompt = first.gather(1, columns.clamp(max=first.shape[1] - 1))
        from_answer = second.gather(1, (columns - starts).clamp(0, second.shape[1] - 1))
        present = columns < totals
        ids = torch.where(columns < starts, from_prompt, from_answer)
        return torch.where(present, ids, 0), present & (columns >= starts)


def chats(files: Sequence[Path], generator: TorchGenerator, left_out: Collection[str] = ()) -> Iterator[Pair]:
    """Yields rows, but for those of some sources, as a prompt and its answers, as the model reads and writes them."""
    names = ", ".join(map(str, files))
    for row in without(Progress(f"read {names}", "rows").over(read_all(files)), left_out):
        if not row.query or not row.hypothetical:
            raise BadData(f"{names}: a row without a query or `hypothetical` documents; care curate hyde adds them")
        answers = [text + generator.end for text in row.hypothetical]
        asked = generator.chat(ask_for_document(row.query))
        yield replace(row, query=asked, positives=answers, negatives=[], hypothetical=[], instruction=None)
