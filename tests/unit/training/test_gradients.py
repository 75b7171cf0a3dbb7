"""Gradient caching: a batch in chunks gives the gradient of the whole batch."""

import numpy as np
import pytest
import torch
from torch import Tensor

from models.encoder.spec import Pooling, Side
from models.encoder.torch import TorchEncoder
from models.training.encoders import set_dropout
from models.training.losses import info_nce, similarities
from models.training.packed import can_pack
from models.training.passes import Passes, Reading, TokenTable, graphs_kept
from models.training.texts import Texts
from tests.support.toy_training import DOCUMENTS, ONE, QUERIES, toy_encoder

ROWS = np.arange(8)
LABELS = torch.arange(8)
NOTHING = torch.zeros(8, 8, dtype=torch.bool)


def readings(encoder: TorchEncoder, *, packed: bool = False) -> list[Reading]:
    sides = ((Side.QUERY, QUERIES), (Side.DOCUMENT, DOCUMENTS))
    return [
        Reading(encoder, TokenTable.build(Texts(side, texts), encoder.spec, encoder.tokenizer, ONE), ROWS, packed)
        for side, texts in sides
    ]


def cached(encoder: TorchEncoder, tokens: int, *, packed: bool = False) -> dict[str, Tensor]:
    encoder.zero_grad()
    both = readings(encoder, packed=packed)
    passes = Passes(both, ONE, tokens=tokens, precision="bf16", seed=3)
    passes.forward()
    loss = info_nce(similarities(both[0].leaf, both[1].leaf), LABELS, NOTHING, 0.1)
    loss.backward()  # type: ignore[no-untyped-call]
    passes.backward()
    return gradients(encoder)


def gradients(encoder: TorchEncoder) -> dict[str, Tensor]:
    return {name: value.grad.clone() for name, value in encoder.named_parameters() if value.grad is not None}


@pytest.mark.parametrize(
    ("architecture", "packed", "pooling"),
    [("bert", False, "cls"), ("qwen3", False, "eos"), ("bert", True, "cls"), ("bert", True, "mean"),
     ("xlm-roberta", True, "eos")],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 64, 10_000])
def test_chunks_give_the_plain_gradient(architecture: str, packed: bool, pooling: str, tokens: int) -> None:
    encoder = toy_encoder(architecture, max_position_embeddings=128, attention_probs_dropout_prob=0.0).double().eval()
    encoder.spec = encoder.spec.model_copy(update={"pooling": Pooling(pooling)})
    assert can_pack(encoder) or not packed
    queries, documents = (encoder.pooled(*reading.tokens.padded(ROWS)) for reading in readings(encoder))
    info_nce(similarities(queries, documents), LABELS, NOTHING, 0.1).backward()  # type: ignore[no-untyped-call]
    plain = gradients(encoder)
    found = cached(encoder, tokens, packed=packed)
    assert plain.keys() == found.keys()
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_both_passes_use_the_same_dropout() -> None:
    """With dropout there is no plain gradient to compare with, but the second pass must repeat the first."""
    encoder = toy_encoder("bert", hidden_dropout_prob=0.5).train()
    seen: list[Tensor] = []
    pooled = encoder.pooled
    encoder.pooled = lambda *given, **named: seen.append(pooled(*given, **named)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    cached(encoder, 40)
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) > 2
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    again = len(seen)
    cached(encoder, 40)
    torch.testing.assert_close(seen[again], seen[0], rtol=0, atol=0)


def test_checkpointing_changes_no_gradient() -> None:
    encoder = toy_encoder("bert", hidden_dropout_prob=0.3).train()
    expected = cached(encoder, 64)
    encoder.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    for name, value in cached(encoder, 64).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)


def test_end_to_end_a_reading_has_no_padding_and_chunks_within_the_budget() -> None:
    (reading, _) = readings(toy_encoder("bert"), packed=True)
    lengths = reading.tokens.lengths[ROWS]
    for tokens in (1, 40, 10_000):
        passes = Passes([reading], ONE, tokens=tokens, precision="fp32", seed=0)
        assert passes.tokens == lengths.sum()
        assert [row for chunk in passes._chunks[0] for row in chunk] == list(ROWS)
        assert all(len(chunk) == 1 or lengths[chunk].sum() <= tokens for chunk in passes._chunks[0])


def test_what_attention_end_to_end_cannot_do_stays_padded() -> None:
    enough: dict[str, object] = {"max_position_embeddings": 128, "attention_probs_dropout_prob": 0.0}
    assert can_pack(toy_encoder("bert", **enough))
    assert not can_pack(toy_encoder("bert", **enough | {"max_position_embeddings": 63}))
    assert not can_pack(toy_encoder("xlm-roberta", **enough | {"max_position_embeddings": 64}))  # one is the padding
    assert not can_pack(toy_encoder("bert", **enough | {"hidden_size": 72, "num_attention_heads": 4}))  # heads of 18
    assert not can_pack(toy_encoder("qwen3", **enough))
    encoder = toy_encoder("bert", **enough | {"attention_probs_dropout_prob": 0.1})
    assert not can_pack(encoder)
    set_dropout(encoder.backbone, 0.0)
    assert can_pack(encoder)


def test_reading_end_to_end_leaves_the_encoder_reading_padded_texts_as_before() -> None:
    encoder = toy_encoder("bert", max_position_embeddings=128, attention_probs_dropout_prob=0.0).eval()
    before = encoder.encode(QUERIES, Side.QUERY)
    cached(encoder, 64, packed=True)
    np.testing.assert_array_equal(encoder.encode(QUERIES, Side.QUERY), before)


def test_padding_is_counted_by_chunk() -> None:
    encoder = toy_encoder("bert")
    (reading, _) = readings(encoder)
    lengths = reading.tokens.lengths[ROWS]
    for tokens in (40, 10_000):
        passes = Passes([reading], ONE, tokens=tokens, precision="fp32", seed=0)
        assert lengths.sum() <= passes.tokens <= len(ROWS) * lengths.max()


@pytest.mark.parametrize(
    ("sizes", "keeps", "kept"),
    [
        ([40, 60], [True, True], 100),
        ([40, 61], [True, False], 40),
        ([60, 60], [False, False], 0),
        ([60, 30, 30], [False, True, False], 30),
    ],
)
def test_kept_graphs_and_recomputed_chunks_stay_within_the_budget(
    sizes: list[int], keeps: list[bool], kept: int
) -> None:
    assert graphs_kept(sizes, 100) == (keeps, kept)
