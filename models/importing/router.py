"""Writes a pair as one sentence-transformers folder: a Router with a query tower and a document tower.

`SentenceTransformer(folder).encode_query` and `encode_document` then give the pair's vectors.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Module, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from tokenizers import Tokenizer as RustTokenizer
from torch import nn

from models.encoder.spec import TOKENIZER_FILE, Pooling, Side
from models.encoder.staging import staging
from models.encoder.torch import TorchEncoder
from models.errors import BadEncoder, ParityError, SpaceMismatch
from models.export.parity import AT_ONCE, CHECK_TEXTS, row_cosines
from models.importing.pairs import require_query_side

MODES = {Pooling.CLS: "cls", Pooling.MEAN: "mean", Pooling.EOS: "lasttoken"}
FLOOR = 0.9999


def write_router(query: Path, document: Path, target: Path) -> float:
    """Writes the folder and returns the least cosine of its vectors to the pair's own; refuses one below FLOOR."""
    if target.exists():
        raise BadEncoder(f"{target} is there already; give another folder, or remove it first")
    encoders = {Side.QUERY: TorchEncoder.load(query), Side.DOCUMENT: TorchEncoder.load(document)}
    specs = [encoder.spec for encoder in encoders.values()]
    require_query_side(query, specs[0])
    if (specs[0].space, specs[0].dim) != (specs[1].space, specs[1].dim):
        raise SpaceMismatch(
            f"{query} is of space {specs[0].space} ({specs[0].dim} dimensions), {document} of {specs[1].space} "
            f"({specs[1].dim}); care encoder pair compares them"
        )
    with staging(target) as work:
        towers = {side: _modules(encoder, work / side) for side, encoder in encoders.items()}
        router = Router.for_query_document(query_modules=towers[Side.QUERY], document_modules=towers[Side.DOCUMENT])
        prompts = {str(side): encoder.spec.instruction(side) for side, encoder in encoders.items()}
        model = SentenceTransformer(modules=[router, Normalize()], device="cpu", prompts=prompts)
        staged = work / "staged"
        model.save(str(staged), create_model_card=False)
        worst = _worst(SentenceTransformer(str(staged), device="cpu", local_files_only=True), encoders)
        if not worst >= FLOOR:
            raise ParityError(f"{target}: vectors differ from the pair's (cosine {worst:.5f}, floor {FLOOR})")
        shutil.move(staged, target)
    return worst


def _modules(encoder: TorchEncoder, folder: Path) -> list[Module]:
    """Returns the tower of one encoder: transformer, pooling, and its projection and cut as one dense layer or two."""
    spec, width = encoder.spec, encoder.backbone.config.hidden_size
    encoder.backbone.save_pretrained(folder, save_original_format=False)
    (folder / TOKENIZER_FILE).write_text(encoder.tokenizer_json, encoding="utf-8")
    token_of = RustTokenizer.from_str(encoder.tokenizer_json).id_to_token
    padding = token_of(encoder.backbone.config.pad_token_id or 0)
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": padding, "model_max_length": spec.max_length}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts), encoding="utf-8")
    modules: list[Module] = [Transformer(str(folder)), PoolingModule(width, MODES[spec.pooling])]
    on_top = encoder.projection
    if on_top is not None or spec.dim != width:
        weight = torch.eye(width) if on_top is None else on_top.weight.detach().float()
        if on_top is not None and on_top.hidden is not None:
            # sentence-transformers' modules follow one another, so the pooled vector x goes through the hidden layer,
            # too: x = relu(x) - relu(-x).
            units, own = on_top.hidden, torch.eye(width)
            rows = torch.cat([own, -own, units.weight.detach().float()])
            shift = torch.cat([torch.zeros(2 * width), units.bias.detach().float()])
            modules.append(Dense(width, len(rows), True, nn.ReLU(), init_weight=rows, init_bias=shift))
            weight = torch.cat([weight[:, :width], -weight[:, :width], weight[:, width:]], dim=1)
        bias = None if on_top is None or on_top.bias is None else on_top.bias.detach().float()[: spec.dim].clone()
        activation = nn.Tanh() if on_top is not None and on_top.tanh else nn.Identity()
        cut = weight[: spec.dim].clone()  # a slice would be saved with its whole storage, which safetensors refuses
        modules.append(Dense(cut.shape[1], spec.dim, bias is not None, activation, init_weight=cut, init_bias=bias))
    return modules


def _worst(model: SentenceTransformer, encoders: dict[Side, TorchEncoder]) -> float:
    found = {Side.QUERY: model.encode_query(list(CHECK_TEXTS)), Side.DOCUMENT: model.encode_document(list(CHECK_TEXTS))}
    pairs = ((found[side], encoder.encode(CHECK_TEXTS, side, AT_ONCE)) for side, encoder in encoders.items())
    return min(float(row_cosines(*pair).min()) for pair in pairs)
