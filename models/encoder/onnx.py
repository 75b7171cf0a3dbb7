"""Runs encoder and reranker folders with ONNX Runtime, without torch: tokens to unit vectors, pairs to scores.

The graph holds everything: transformer, pooling, truncation and norm, or transformer and score.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from models.encoder.pairs import PairReader, PairTokenizer, RerankerSpec, open_pair_tokenizer
from models.encoder.spec import EncoderSpec, Side, Variant, verify_graph
from models.encoder.tokenizer import Ids, TextReader, Tokenizer, Tokens, best_variant, open_tokenizer, pad
from models.errors import BadEncoder

Vectors = NDArray[np.float32]
Scores = NDArray[np.float32]

# Padding is at most a third of a batch of bulk texts, which are sorted by length first; 4,096 tokens keep two
# cores busy without holding more than a few megabytes of activations.
BULK_TOKENS = 4096
# On two cores about ten seconds of a small encoder's work.
BULK_TEXTS = 1024
# On a CPU its fused kernel takes five to nine times as long as the addition and the norm that it replaces.
SLOW_ON_CPU = ["SkipLayerNormFusion"]


class OnnxEncoder(TextReader):
    """A TextReader with weights: encodes token batches; safe to call from several threads."""

    bulk_texts = BULK_TEXTS

    def __init__(
        self, spec: EncoderSpec, variant: Variant, tokenizer: Tokenizer, session: ort.InferenceSession
    ) -> None:
        super().__init__(spec, variant, variant.filename, tokenizer)
        self._session = session
        self._inputs = {node.name for node in session.get_inputs()}

    @classmethod
    def load(
        cls, folder: Path, variant: Variant | None = None, *, device: str = "cpu", threads: int = 0
    ) -> OnnxEncoder:
        """Opens and verifies an encoder folder; picks the fastest variant for the device unless one is given."""
        spec = EncoderSpec.load(folder)
        chosen = variant or best_variant(folder, device)
        session = open_session(verify_graph(folder, chosen.filename, spec), device, threads)
        tokenizer = open_tokenizer(folder, spec)
        encoder = cls(spec, chosen, tokenizer, session)
        width = encoder.encode_tokens([tokenizer("")]).shape[1]
        if width != spec.dim:
            raise BadEncoder(f"{folder}: {chosen.filename} gives {width} dimensions, encoder.json says {spec.dim}")
        return encoder

    def encode_tokens(self, batch: Sequence[Tokens]) -> Vectors:
        """Returns unit vectors (texts, dim) of one batch, in the order given."""
        return self.encode_padded(*pad(batch))

    def encode_padded(self, ids: Ids, mask: Ids) -> Vectors:
        """Returns unit vectors (texts, dim) of ids and attention mask, both (texts, longest)."""
        feeds = {"input_ids": ids, "attention_mask": mask}
        return _run(self._session, "embedding", {name: feeds[name] for name in self._inputs}, self.spec)

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        """Returns unit vectors (texts, dim) of any number of texts."""
        return self.encode_bulk(self.tokenize(texts, side))

    def encode_bulk(self, tokens: Sequence[Tokens]) -> Vectors:
        """Encodes any number of tokenised texts to unit vectors (texts, dim), in bulk batches; int8 takes each alone.

        Dynamic int8 has one scale for a whole batch, so in a batch a vector would depend on the texts beside it. Alone
        it takes no longer on a CPU: there is no padding.
        """
        vectors = np.empty((len(tokens), self.spec.dim), dtype=np.float32)
        budget = 1 if self.variant is Variant.INT8 else BULK_TOKENS
        for rows in bulk_batches([len(t) for t in tokens], budget):
            vectors[rows] = self.encode_tokens([tokens[row] for row in rows])
        return vectors


class OnnxReranker(PairReader):
    """A PairReader with weights: scores batches of pairs; safe to call from several threads."""

    def __init__(
        self, name: str, spec: RerankerSpec, variant: Variant, tokenizer: PairTokenizer, session: ort.InferenceSession
    ) -> None:
        super().__init__(name, spec, variant, tokenizer)
        self._session = session

    @classmethod
    def load(
        cls, folder: Path, variant: Variant | None = None, *, device: str = "cpu", threads: int = 0
    ) -> OnnxReranker:
        """Opens and verifies a reranker folder; picks the fastest variant for the device unless one is given."""
        spec = RerankerSpec.load(folder)
        chosen = variant or best_variant(folder, device)
        session = open_session(verify_graph(folder, chosen.filename, spec), device, threads)
        return cls(folder.resolve().name, spec, chosen, open_pair_tokenizer(folder, spec), session)

    def score_tokens(self, batch: Sequence[Tokens]) -> Scores:
        """Returns scores of one batch of pairs, in the order given."""
        return self.score_padded(*pad(batch))

    def score_padded(self, ids: Ids, mask: Ids) -> Scores:
        """Returns scores of pairs by their ids and attention mask, both (pairs, longest)."""
        return _run(self._session, "score", {"input_ids": ids, "attention_mask": mask}, self.spec)

    def score(self, pairs: Sequence[Tokens]) -> Scores:
        """Scores any number of pairs, in bulk batches; int8 takes each alone, as `OnnxEncoder.encode_bulk` does."""
        scores = np.empty(len(pairs), dtype=np.float32)
        budget = 1 if self.variant is Variant.INT8 else BULK_TOKENS
        for rows in bulk_batches([len(pair) for pair in pairs], budget):
            scores[rows] = self.score_tokens([pairs[row] for row in rows])
        return scores


def open_session(graph: Path, device: str, threads: int) -> ort.InferenceSession:
    provider = "CUDAExecutionProvider" if device == "cuda" else "CPUExecutionProvider"
    # For a missing provider, ONNX Runtime would fall back to the CPU almost silently.
    if provider not in ort.get_available_providers():
        raise BadEncoder(f"device {device}: ONNX Runtime has no {provider} here; leave the device out")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Idle threads that spin take the cores from search, from HTTP and from other encoders.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    slow = [] if device == "cuda" else SLOW_ON_CPU
    try:
        return ort.InferenceSession(str(graph), options, providers=[provider], disabled_optimizers=slow)
    except Exception as error:  # ONNX Runtime's own exceptions have no common class
        raise BadEncoder(f"{graph}: ONNX Runtime cannot open it; export the encoder again") from error


def _run(
    session: ort.InferenceSession, output: str, feeds: dict[str, Ids], spec: EncoderSpec | RerankerSpec
) -> NDArray[np.float32]:
    try:
        (found,) = session.run([output], feeds)
    except Exception as error:  # ONNX Runtime's own exceptions have no common class
        count, reason = feeds["input_ids"].shape[1], str(error).partition("\n")[0]
        raise BadEncoder(
            f"the graph fails on {count} tokens; if max_length in {spec.file} was raised to {spec.max_length}, restore "
            f"the exported number ({reason})"
        ) from error
    return np.asarray(found, dtype=np.float32)


def bulk_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yields rows in batches of at most `budget` padded tokens, longest first, so that a batch holds like lengths."""
    batch: list[int] = []
    for row in np.argsort(lengths, kind="stable")[::-1].tolist():
        if batch and lengths[batch[0]] * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
