"""Describes rerankers (`reranker.json`) and tokenises a query and a document as one sequence; loads no weights.

A reranker, or cross-encoder, reads a query and a document together and gives one score. No torch, no ONNX Runtime.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.encoder.spec import RERANKER_FILE, TOKENIZER_FILE, Variant, fault, share_weights, verify_file
from models.encoder.tokenizer import Tokenizer, Tokens, best_variant
from models.errors import BadEncoder

# Separators between the two texts, as the tokenizers of these architectures put them.
SEPARATORS: dict[str, Literal[1, 2]] = {"bert": 1, "roberta": 2, "xlm-roberta": 2}


class ScoreParity(BaseModel):
    """How close an exported graph came to the torch reranker on the check pairs.

    `difference` is the largest one between two scores, in standard deviations of the reference's scores.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    correlation: float
    difference: float
    pairs: int


class RerankerSpec(BaseModel):
    """The content of `reranker.json`. Its presence says that the folder is a reranker and not an encoder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    max_length: Annotated[int, Field(ge=8)]
    """Tokens of a pair. A query is cut to half of them, then the document to what is left."""
    separators: Literal[1, 2]
    token_types: bool = False
    """Whether the document's tokens are of type 1."""
    checksums: dict[str, str] = {}
    parity: dict[Variant, ScoreParity] = {}
    weights: str | None = None
    """Names the trained weights that the folder's graphs were exported from."""

    @property
    def file(self) -> str:
        return RERANKER_FILE

    def fingerprint(self, weights: str) -> str:
        """Names the function (query, document) → score computed with this file of weights."""
        facts = self.model_dump(mode="json", include={"architecture", "max_length", "separators", "token_types"})
        facts["files"] = [self.checksums.get(name) for name in (weights, TOKENIZER_FILE)]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        text = json.dumps(self.model_dump(mode="json"), ensure_ascii=False, indent=2) + "\n"
        (folder / RERANKER_FILE).write_text(text, encoding="utf-8")
        share_weights(folder / RERANKER_FILE)

    @classmethod
    def load(cls, folder: Path) -> RerankerSpec:
        path = folder / RERANKER_FILE
        if not path.is_file():
            raise BadEncoder(
                f"{folder} is not a reranker folder: {RERANKER_FILE} is missing (care encoder import writes one)"
            )
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise BadEncoder(f"{path}: {fault(error)}") from error


def is_reranker(folder: Path) -> bool:
    return (folder / RERANKER_FILE).is_file()


class PairTokenizer:
    """Tokenises queries and documents apart and joins them, so that a text of several pairs is tokenised once."""

    def __init__(self, tokenizer_json: str, spec: RerankerSpec) -> None:
        self._queries = Tokenizer.from_json(tokenizer_json, spec.max_length // 2)
        self._documents = Tokenizer.from_json(tokenizer_json, spec.max_length)
        self._max_length, self._extra = spec.max_length, spec.separators - 1
        first, last = self._queries("").ids[:1], self._queries("a").ids[-1:]
        if self._queries("").ids != [*first, *last] or first == last:
            raise BadEncoder("a reranker's tokenizer must begin and end a text with one special token each")

    def query(self, text: str) -> Tokens:
        return self._queries(text)

    def documents(self, texts: Sequence[str]) -> list[Tokens]:
        return self._documents.batch(texts)

    def join(self, query: Tokens, document: Tokens) -> Tokens:
        """Joins the pair as the architecture reads it: [CLS] query [SEP] document [SEP], or with two separators."""
        start = query.ids + query.ids[-1:] * self._extra
        rest, room = document.ids[1:], self._max_length - len(start)
        if len(rest) <= room:
            return Tokens(start + rest, query.truncated or document.truncated)
        return Tokens(start + rest[: room - 1] + rest[-1:], truncated=True)

    def pairs(self, query: str, documents: Sequence[str]) -> list[Tokens]:
        """Returns the query with each of the documents."""
        asked = self.query(query)
        return [self.join(asked, document) for document in self.documents(documents)]


class PairReader:
    """A reranker folder whose weights another process may hold: tokenises pairs; `fingerprint` names its function.

    `name` is the folder's.
    """

    def __init__(self, name: str, spec: RerankerSpec, variant: Variant, tokenizer: PairTokenizer) -> None:
        self.name, self.spec, self.variant, self.tokenizer = name, spec, variant, tokenizer
        self.fingerprint = spec.fingerprint(variant.filename)

    @staticmethod
    def open(folder: Path, *, device: str = "cpu") -> PairReader:
        spec = RerankerSpec.load(folder)
        tokenizer = open_pair_tokenizer(folder, spec)
        return PairReader(folder.resolve().name, spec, best_variant(folder, device), tokenizer)


def open_pair_tokenizer(folder: Path, spec: RerankerSpec) -> PairTokenizer:
    path = verify_file(folder, TOKENIZER_FILE, spec)
    return PairTokenizer(path.read_text(encoding="utf-8"), spec)
