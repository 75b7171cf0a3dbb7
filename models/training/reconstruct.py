"""RetroMAE stage: an encoder learns to put a text into one vector from which a weak decoder can rebuild the text.

The encoder sees a lightly masked text. The decoder is a single layer that gets the embedding and, for each position,
another random choice of the text's other tokens; it has to name every token (enhanced decoding). The decoder and the
heads are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from tokenizers import Tokenizer as RustTokenizer
from torch import Tensor, nn
from torch.nn import functional

from models.encoder.torch import TorchEncoder, pool
from models.errors import BadEncoder
from models.training.encoders import EncoderStore
from models.training.losses import reconstruction
from models.training.passes import TokenTable, autocast
from models.training.stages import Reconstruct
from models.training.work import Work, read_table

MASK_TOKENS = ("[MASK]", "<mask>")
HEADS_WIDTH = 64
DECODER = "decoder"


class Decoder(nn.Module):
    """One layer of attention over a text of which each position sees a part, and the heads that name tokens."""

    def __init__(self, width: int, positions: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEADS_WIDTH)
        self.positions = nn.Embedding(positions, width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        # Between states and the word embeddings: of the encoder, of the decoder.
        self.naming = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(2)
        )

    def forward(self, embedding: Tensor, words: Tensor, visible: Tensor) -> Tensor:
        """Hidden states (texts, tokens, width): of the embedding (texts, width), the words' own vectors (texts,
        tokens, width) and what each position may see (texts, tokens, tokens)."""
        texts, tokens, width = words.shape
        places = self.positions.weight[:tokens]
        asking = embedding[:, None] + places
        context = torch.cat([embedding[:, None], words[:, 1:] + places[1:]], dim=1)
        parts = (self.query(asking), self.key(context), self.value(context))
        q, k, v = (part.view(texts, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None])
        states = self.norms[0](asking + self.out(mixed.transpose(1, 2).reshape(texts, tokens, width)))
        widened: Tensor = self.norms[1](states + self.down(functional.gelu(self.up(states))))
        return widened


def visible_parts(mask: Tensor, share: float, chance: torch.Generator) -> Tensor:
    """(texts, tokens, tokens): each position sees the embedding's place 0 and a random share of the other tokens,
    never itself."""
    texts, tokens = mask.shape
    drawn = torch.rand(texts, tokens, tokens, generator=chance).to(mask.device) < share
    seen = drawn & mask[:, None, :].bool() & ~torch.eye(tokens, dtype=torch.bool, device=mask.device)
    seen[:, :, 0] = True
    return seen


class ReconstructStage(Work):
    """The work of one RetroMAE stage, a step at a time."""

    _stage: Reconstruct

    def __init__(self, store: EncoderStore, stage: Reconstruct, files: list[Path], scratch: Path) -> None:
        ranks, data = store.ranks, stage.data.model_copy(update={"view": "texts"})
        super().__init__(store, stage, read_table(files, data, store.recipe.seed, scratch, ranks), scratch)
        self._dealer = self._deal(self._table)
        self._encoder = encoder = store.open(stage.encoder, trained=True)
        self._decoder = Decoder(encoder.backbone.config.hidden_size, encoder.spec.max_length).to(ranks.device)
        self._mask_id = mask_id(encoder)
        texts = self._table.documents
        self._tokens = TokenTable.build(texts, encoder.spec, encoder.tokenizer, ranks, scratch / "tokens")

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {self._stage.encoder: self._encoder, DECODER: self._decoder}

    def gradients(self, step: int, scale: Callable[[Tensor], Tensor]) -> dict[str, float]:
        rows = self._dealer.deal(step).documents
        own = rows[self._ranks.share(len(rows))]
        seed = self._ranks.seed(self._store.recipe.seed, step)
        chance = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        sums = torch.zeros(2, device=self._ranks.device)
        chunks = [self._tokens.padded(own[chunk]) for chunk in self._tokens.chunks(own, self._stage.tokens)]
        masked = [torch.rand(ids.shape, generator=chance) < self._stage.encoder_mask for ids, _ in chunks]
        inner = [_inner(mask) for _, mask in chunks]
        chosen = [drawn.to(within.device) & within for drawn, within in zip(masked, inner, strict=True)]
        counts = torch.tensor([sum(int(c.sum()) for c in chosen), sum(int(i.sum()) for i in inner)]).float()
        counts = self._ranks.sum(counts.to(self._ranks.device)).clamp_min(1)
        for (ids, mask), hidden, within in zip(chunks, chosen, inner, strict=True):
            with autocast(self._ranks.device, self._stage.precision):
                found = self._chunk(ids, mask, hidden, within, chance)
            scale((found / counts).sum()).backward()  # type: ignore[no-untyped-call]
            sums += found.detach()
        encoder_loss, decoder_loss = (self._ranks.sum(sums) / counts).tolist()
        facts = {"loss": encoder_loss + decoder_loss, "encoder": encoder_loss, "decoder": decoder_loss}
        tokens = sum(ids.numel() for ids, _ in chunks) * self._ranks.size
        return facts | {"texts": len(rows), "tokens": tokens}

    def _chunk(self, ids: Tensor, mask: Tensor, chosen: Tensor, inner: Tensor, chance: torch.Generator) -> Tensor:
        """Returns the two sums of cross-entropies: of the encoder's masked tokens, and of all tokens by the decoder."""
        backbone = self._encoder.backbone
        words = backbone.get_input_embeddings()
        shown = ids.masked_fill(chosen, self._mask_id)
        states = backbone(input_ids=shown, attention_mask=mask).last_hidden_state
        embedding = pool(states, mask, self._encoder.spec.pooling)
        rebuilt = self._decoder(embedding, words(ids), visible_parts(mask, 1 - self._stage.decoder_mask, chance))
        own, others = self._decoder.naming
        vocabulary = cast(Tensor, words.weight)
        encoder_loss = reconstruction(own(states), vocabulary, ids, chosen)
        return torch.stack([encoder_loss, reconstruction(others(rebuilt), vocabulary, ids, inner)])


def _inner(mask: Tensor) -> Tensor:
    """Returns the tokens between a text's first and last, which are markers."""
    inner = mask.bool().clone()
    inner[:, 0] = False
    inner[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1] = False
    return inner


def mask_id(encoder: TorchEncoder) -> int:
    """Returns the id of the tokenizer's mask token."""
    backend = RustTokenizer.from_str(encoder.tokenizer_json)
    for token in MASK_TOKENS:
        if (found := backend.token_to_id(token)) is not None:
            return int(found)
    raise BadEncoder(f"RetroMAE needs a tokenizer with {' or '.join(MASK_TOKENS)}; this one has neither")
