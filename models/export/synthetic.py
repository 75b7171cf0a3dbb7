"""Makes an encoder of any shape with random weights, to measure the cost of running it.

    python -m models.export.synthetic TARGET --layers 12 --width 768 --vocabulary 250000 --variant fp16

A BERT by a fixed seed with a WordPiece vocabulary of Chinese characters and made-up words, exported like any other.
The graph is held to torch's vectors by their cosine only: random embeddings lie so close together that their order
is noise.
"""

from __future__ import annotations

import argparse
import string
import tempfile
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel

from models.encoder.spec import TOKENIZER_FILE, EncoderSpec, Pooling, Variant
from models.export.parity import FLOORS
from models.export.pipeline import Backend, ExportReport, export

SEED = 0
SPACE = "synthetic"
HEAD_WIDTH = 64
MAX_LENGTH = 512
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CHARACTERS = range(0x4E00, 0x9FA6)
# With BERT's own 0.02 every text would have nearly the same embedding, and every query the same hits.
WEIGHT_SPREAD = 0.1


def make_encoder(
    target: Path, *, layers: int, width: int, vocabulary: int, variant: Variant
) -> ExportReport[EncoderSpec]:
    """Writes an encoder folder with one graph."""
    words = vocabulary_of(vocabulary)
    floors = {variant: replace(FLOORS[variant], top10_overlap=0.0)}
    use: dict[str, Any] = {"space": SPACE, "pooling": Pooling.CLS, "max_length": MAX_LENGTH}
    with tempfile.TemporaryDirectory(prefix="care-synthetic-") as made:
        source = Path(made)
        save_tokenizer(words, source / TOKENIZER_FILE)
        torch.manual_seed(SEED)
        config = BertConfig(
            vocab_size=len(words),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=max(1, width // HEAD_WIDTH),
            intermediate_size=4 * width,
            max_position_embeddings=MAX_LENGTH,
            initializer_range=WEIGHT_SPREAD,
        )
        BertModel(config, add_pooling_layer=False).save_pretrained(source)  # type: ignore[no-untyped-call]
        return export(source, target, variants=[variant], backend=Backend.TORCH, floors=floors, **use)


def vocabulary_of(size: int) -> list[str]:
    """Special tokens, then Chinese characters, then words of letters: `size` different ones."""
    words = ("".join(letters) for length in range(1, 5) for letters in product(string.ascii_lowercase, repeat=length))
    return list(islice((*SPECIAL, *map(chr, CHARACTERS), *words), size))


def save_tokenizer(words: list[str], file: Path) -> None:
    """Writes a WordPiece tokenizer over these words, [CLS] … [SEP] around a text."""
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    )
    tokenizer.save(str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the encoder folder to write")
    parser.add_argument("--layers", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--width", type=int, default=768, help="dimensions (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=250_000, help="tokens (%(default)s)")
    parser.add_argument("--variant", type=Variant, choices=list(Variant), default=Variant.FP16, help="(%(default)s)")
    options = parser.parse_args()
    report = make_encoder(**vars(options))
    (graph,) = report.graphs
    size, cosine = f"{graph.size_bytes / 1e6:.0f} MB", f"cosine {graph.parity.cosine:.5f}"
    print(f"{report.folder}: {graph.variant.filename}, {size}, {cosine}")


if __name__ == "__main__":
    main()
