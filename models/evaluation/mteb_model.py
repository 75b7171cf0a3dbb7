"""A pair of encoders as a model that mteb itself can run: `mteb.evaluate(MtebPair.load("FOLDER"), tasks=…)`.

Queries go through the query encoder and documents through the document encoder; texts that are neither (similarity of
sentences) are taken for queries, as our own evaluation does. Each side has the instruction of its `encoder.json`, or
one that takes its place. Knows nothing of tasks or metrics, and asks no hub for anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from models.errors import BadEncoder
from models.evaluation.cache import Vectors
from models.evaluation.encoders import OpenEncoder, open_encoder
from models.evaluation.mteb_import import import_mteb
from models.evaluation.readers import EncoderReader, PairReader
from models.evaluation.sets import Kind, PairSet, Task
from models.spec import Side

ORGANISATION = "care-search"
"""mteb wants every model to belong to someone."""


class MtebPair:
    """Implements mteb's `EncoderProtocol`. An instruction of None leaves the encoder its own."""

    def __init__(
        self,
        query: OpenEncoder,
        document: OpenEncoder,
        *,
        query_instruction: str | None = None,
        document_instruction: str | None = None,
    ) -> None:
        for encoder, side in ((query, Side.QUERY), (document, Side.DOCUMENT)):
            if side not in encoder.spec.sides:
                raise BadEncoder(f"{encoder.name}: not made to read {side} texts; take the pair's other encoder")
        self._reader = PairReader(EncoderReader(query, None), EncoderReader(document, None))
        # Readers ask a task for its instructions and nothing else.
        sentences = PairSet("mteb", [], [])
        self._task = Task("mteb", sentences, Kind.STS, "Pearson", query_instruction, document_instruction)
        self.mteb_model_meta = self._describe(query, document)

    @classmethod
    def load(
        cls,
        query: str,
        document: str | None = None,
        *,
        query_instruction: str | None = None,
        document_instruction: str | None = None,
    ) -> MtebPair:
        """Opens a query encoder and a document encoder of one space; a single folder is its own pair.

        Folders are written as `care eval` takes them, with ONNX graphs or torch weights: `FOLDER[,variant=fp32,…]`.
        """
        first = open_encoder(query)
        second = open_encoder(document) if document else first
        return cls(first, second, query_instruction=query_instruction, document_instruction=document_instruction)

    def encode(self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: object = None, **_: object) -> Vectors:
        """Unit vectors (texts, dim) of mteb's batches {text: [...]}; what else mteb tells of the task is not needed."""
        side = Side.DOCUMENT if prompt_type == Side.DOCUMENT else Side.QUERY
        return self._reader.read([text for batch in inputs for text in batch["text"]], side, self._task)

    def similarity(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> Vectors:
        """Cosines (first, second)."""
        return np.asarray(np.asarray(embeddings1) @ np.asarray(embeddings2).T, dtype=np.float32)

    def similarity_pairwise(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> Vectors:
        """Cosines (pairs,) of rows that belong together."""
        return np.asarray((np.asarray(embeddings1) * np.asarray(embeddings2)).sum(axis=-1), dtype=np.float32)

    def _describe(self, query: OpenEncoder, document: OpenEncoder) -> Any:  # noqa: ANN401 -- mteb's ModelMeta
        """What mteb keeps with a result; the revision names the weights, so that no cached result outlives them."""
        import_mteb()
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        facts = self._reader.query.facts if query is document else self._reader.facts
        stated = {f"{side}_instruction": self._task.instruction(side) for side in Side}
        stated = {name: text for name, text in stated.items() if text is not None}
        own = (query.spec.query_instruction, document.spec.document_instruction)
        return ModelMeta.create_empty(
            {
                "name": f"{ORGANISATION}/{facts.name}",
                "revision": facts.fingerprint,
                "n_parameters": facts.parameters,
                "max_tokens": min(query.spec.max_length, document.spec.max_length),
                "embed_dim": facts.dim,
                "similarity_fn_name": ScoringFunction.COSINE,
                "use_instructions": any(own) or any(stated.values()),
                "experiment_kwargs": stated or None,
            }
        )
