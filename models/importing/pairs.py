"""Checks whether two encoders share an embedding space, by their declarations and by vectors of the check texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.encoder.address import load_encoder
from models.encoder.spec import EncoderSpec, Side, Variant
from models.errors import SpaceMismatch
from models.export.parity import AT_ONCE, CHECK_TEXTS

# The share of texts that find themselves among the others, and how far a text's own cosine lies between the others'
# and 1. Encoders with a common ancestor may pass the first alone: bge-small-zh and m3e-small have 90 % and 0.24;
# bge-small-zh and the encoder that was fine-tuned from it have 100 % and 0.95.
MATCHED, CLOSE = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison. A text finds itself if its document vector is the nearest to its query vector."""

    spaces: tuple[str, str]
    texts: int
    matched: float
    same: float
    others: float

    @property
    def closeness(self) -> float:
        return (self.same - self.others) / max(1 - self.others, 1e-6)

    @property
    def fits(self) -> bool:
        return self.matched >= MATCHED and self.closeness >= CLOSE

    @property
    def shared(self) -> bool:
        return self.spaces[0] == self.spaces[1] and self.fits

    @property
    def verdict(self) -> str:
        if self.shared:
            return "they share a space: documents of one can be searched by queries of the other"
        if self.fits:
            return "the vectors fit, the names of the spaces do not: import or export one with the other's --space"
        if self.spaces[0] == self.spaces[1]:
            limits = f"at least {MATCHED:.0%} and closeness {CLOSE}"
            return f"the names are equal, the vectors do not fit ({limits}): never search one by the other"
        return "they do not share a space: train them together (care train), or use one encoder for both sides"


def compare(query: Path, document: Path) -> Comparison:
    """Encodes the check texts as queries by one and as documents by the other."""
    specs = EncoderSpec.load(query), EncoderSpec.load(document)
    require_query_side(query, specs[0])
    if specs[0].dim != specs[1].dim:
        raise SpaceMismatch(
            f"{query} has {specs[0].dim} dimensions, {document} {specs[1].dim}: give one the other's --dim"
        )
    asked = _encode(query, specs[0], Side.QUERY)
    found = _encode(document, specs[1], specs[1].document_side)
    scores = asked @ found.T
    own = np.arange(len(scores))
    others = scores[~np.eye(len(scores), dtype=bool)]
    return Comparison(
        spaces=(specs[0].space, specs[1].space),
        texts=len(scores),
        matched=float((scores.argmax(axis=1) == own).mean()),
        same=float(scores[own, own].mean()),
        others=float(others.mean()),
    )


def require_query_side(folder: Path, spec: EncoderSpec) -> None:
    if Side.QUERY not in spec.sides:
        raise SpaceMismatch(f"{folder} reads documents only: the encoder that reads queries is given first")


def _encode(folder: Path, spec: EncoderSpec, side: Side) -> np.ndarray:
    if spec.address is not None or any(variant.filename in spec.checksums for variant in Variant):
        return load_encoder(folder).encode(CHECK_TEXTS, side)
    from models.encoder.torch import TorchEncoder

    return TorchEncoder.load(folder).encode(CHECK_TEXTS, side, AT_ONCE)
