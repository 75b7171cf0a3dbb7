"""An encoder folder without its weights: text to the tokens that the encoder reads. No ONNX Runtime, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from models.errors import BadEncoder
from models.spec import TOKENIZER_FILE, EncoderSpec, Side, Variant, verify_file
from models.tokenizer import Tokenizer, Tokens

CPU_PREFERENCE = (Variant.INT8, Variant.FP32)
GPU_PREFERENCE = (Variant.FP16, Variant.FP32)


class TextReader:
    """What an encoder is to those who prepare its texts; `fingerprint` names the function text → embedding."""

    def __init__(self, spec: EncoderSpec, variant: Variant, tokenizer: Tokenizer) -> None:
        self.spec = spec
        self.variant = variant
        self.fingerprint = spec.fingerprint(variant.filename)
        self.tokenizer = tokenizer

    @classmethod
    def open(cls, folder: Path, *, device: str = "cpu") -> Self:
        """Opens an encoder folder for whoever holds its weights on the device."""
        spec = EncoderSpec.load(folder)
        return cls(spec, best_variant(folder, device), open_tokenizer(folder, spec))

    def tokenize(self, texts: Sequence[str], side: Side) -> list[Tokens]:
        instruction = self.spec.instruction(side)
        return self.tokenizer.batch([instruction + text for text in texts] if instruction else texts)


def open_tokenizer(folder: Path, spec: EncoderSpec) -> Tokenizer:
    return Tokenizer.load(verify_file(folder, TOKENIZER_FILE, spec), spec.max_length)


def has_graph(folder: Path) -> bool:
    """Whether any ONNX graph lies in the folder."""
    return any((folder / variant.filename).is_file() for variant in Variant)


def best_variant(folder: Path, device: str) -> Variant:
    """The fastest of the folder's graphs on cpu or cuda."""
    preference = GPU_PREFERENCE if device == "cuda" else CPU_PREFERENCE
    for variant in preference:
        if (folder / variant.filename).is_file():
            return variant
    names = " or ".join(variant.filename for variant in preference)
    raise BadEncoder(f"{folder}: no ONNX graph ({names}); care export makes one")
