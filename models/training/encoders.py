"""Encoders of a run: tracks where each one is stored, and opens it for training or inference.

Stages pass encoders on as folders. Opening one decides what is trained of it: all weights, or adapters on a frozen
base. Writing it merges adapters into the weights that they were trained on.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import nn
from transformers import AutoModel

from models.encoder.folder import infer_spec, read_config
from models.encoder.gguf import unpack_gguf
from models.encoder.packed import joined
from models.encoder.packed.hubs import Hubs
from models.encoder.spec import (
    BESIDE,
    INSTRUCTION,
    SPEC_FILE,
    TOKENIZER_FILE,
    EncoderSpec,
    Side,
    sha256_of,
)
from models.encoder.torch import PROJECTION_FILE, Projection, TorchEncoder, keep_layers, not_finite, weights_digest
from models.encoder.torch_generator import TorchGenerator
from models.encoder.torch_reranker import TorchReranker
from models.errors import BadEncoder
from models.evaluation.benchmarks import wording
from models.export.parity import AT_ONCE, CHECK_TEXTS
from models.training.adapters import Adaptable, add_adapters, restore_trained, save_adapter, trained_weights
from models.training.int8 import quantize_base
from models.training.ranks import Ranks
from models.training.recipe import Encoder, Recipe
from models.training.shapes import fresh_config
from models.training.texts import Texts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Trainable = Adaptable | TorchReranker
# Weights, also of dense layers and adapters in folders below; configurations; vocabularies.
DECIDING = {".safetensors", ".bin", ".json", ".txt", ".model"}
START, VECTORS = "start", "vectors"
# Of a query: some are passages' beginnings.
QUERY_CHARACTERS = 60
# Texts by whose vectors an import recognises the encoder that stood beside another.
CHECKED = 8


class EncoderStore:
    """The current folder of each encoder. Each stage opens the encoders that it needs anew."""

    def __init__(self, recipe: Recipe, folder: Path, ranks: Ranks, vectors: Path | None = None) -> None:
        self.recipe, self.ranks = recipe, ranks
        self.vectors = vectors or folder / VECTORS
        self._starts = folder / START
        self.moments = self._starts / "moments.npy"
        """Products of side-by-side vectors, if an encoder stands beside another."""
        self.sample = self._starts / "sample.npz"
        """Queries of the last contrast stage and side-by-side vectors of its documents (`keep_sample`)."""
        self._folders: dict[str, Path] = {}
        self._fingerprints: dict[tuple[str, Path], str] = {}

    def folder(self, name: str) -> Path:
        """Returns where the encoder is: what a stage wrote, or its start."""
        if name not in self._folders:
            config = self.recipe.encoders[name]
            if config.copy_of is not None:
                return self.folder(config.copy_of)
            self._folders[name] = self._make_fresh(name) if config.fresh else self._start(name, Path(str(config.start)))
        return self._folders[name]

    def _start(self, name: str, start: Path) -> Path:
        if start.suffix == ".gguf" and start.is_file():
            start = unpack_gguf(start, self._starts / name, writes=name in self.recipe.generators)
        if not start.is_dir():
            raise BadEncoder(f"encoders.{name}.start: {start} is not there; put the weights into that folder")
        return start

    def _make_fresh(self, name: str) -> Path:
        """Returns a transformers folder with random weights; the folder is there whole or not at all."""
        folder, fresh = self._starts / name, self.recipe.encoders[name].fresh
        assert fresh is not None
        if not folder.is_dir():
            new = folder.with_name(folder.name + ".new")
            torch.manual_seed(self.recipe.seed)
            AutoModel.from_config(fresh_config(fresh), add_pooling_layer=False).save_pretrained(new)  # type: ignore[no-untyped-call]
            shutil.copyfile(fresh.tokenizer, new / TOKENIZER_FILE)
            new.rename(folder)
        return folder

    def replace(self, name: str, folder: Path) -> None:
        self._folders[name] = folder

    def hold(self, names: Iterable[str]) -> None:
        """Keeps copies as they are now, whatever becomes of the encoders that they copy."""
        for name in names:
            if self.recipe.encoders[name].copy_of is not None:
                self.replace(name, self.folder(name))

    def fingerprint(self, name: str) -> str:
        """Names the function text → vector that the encoder is now."""
        folder = self.folder(name)
        if (name, folder) not in self._fingerprints:  # hashing all weights takes a while
            files = sorted(path for path in folder.rglob("*") if path.suffix in DECIDING)
            facts = [self.spec(name).model_dump_json(exclude={"checksums", "parity", "space"})]
            facts += [str(self.recipe.encoders[name].layers)]
            facts += [f"{path.relative_to(folder).as_posix()} {sha256_of(path)}" for path in files]
            self._fingerprints[name, folder] = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
        return self._fingerprints[name, folder]

    def spec(self, name: str) -> EncoderSpec:
        """Returns the encoder as the recipe uses it; what the recipe does not say is the folder's own."""
        folder, config = self.folder(name), self.recipe.encoders[name]
        own = EncoderSpec.load(folder) if (folder / SPEC_FILE).is_file() else None
        spec = own or infer_spec(folder, space=self.recipe.space, pooling=config.pooling)
        changes: dict[str, object] = {
            "space": self.recipe.space,
            "native_dim": config.projection or spec.native_dim,
            "dim": self.recipe.part_of(name),
            "max_length": config.max_length,
            "pooling": config.pooling or spec.pooling,
            "checksums": {},
            "parity": {},
        }
        keys = ("query_instruction", "document_instruction", "query_template")
        changes |= {key: value for key in keys if (value := getattr(config, key)) is not None}
        if config.instruction is not None:
            template = config.query_template or spec.query_template
            changes["query_instruction"] = template.replace(INSTRUCTION, wording(config.instruction))
        try:
            return EncoderSpec.model_validate(spec.model_dump() | changes)
        except ValidationError as error:
            raise BadEncoder(f"encoders.{name}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error

    def asked_of(self, name: str, texts: Texts) -> Texts:
        """Returns the texts, without the rows' instructions if the recipe gives the encoder a query_instruction."""
        return texts if self.recipe.encoders[name].query_instruction is None else replace(texts, instructions=None)

    def open(self, name: str, *, trained: bool) -> TorchEncoder:
        """Opens the encoder on the training device; what is trained of it requires gradients."""
        encoder = self._open(name, trained=trained)
        assert isinstance(encoder, TorchEncoder)
        return encoder

    def open_generator(self, name: str) -> TorchGenerator:
        """Opens the language model on the training device; what is trained of it requires gradients."""
        generator = self._open(name, trained=True)
        assert isinstance(generator, TorchGenerator)
        return generator

    def _open(self, name: str, *, trained: bool) -> Adaptable:
        config = self.recipe.encoders[name]
        torch.manual_seed(self.recipe.seed if trained else 0)
        frozen_base = not trained or config.lora is not None
        encoder = self._load(name, DTYPES[config.dtype] if frozen_base else torch.float32)
        if self.ranks.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            encoder.float()  # rounded all the same: products in bf16 take such a processor a hundred times as long
        encoder.requires_grad_(not frozen_base)
        if trained and config.lora is not None:
            add_adapters(encoder, config.lora)
            if config.bits == 8:
                quantize_base(encoder.backbone)
            if isinstance(encoder, TorchEncoder) and encoder.projection is not None:
                encoder.projection.float().requires_grad_(True)
        if trained and config.dropout is not None:
            set_dropout(encoder.backbone, config.dropout)
        if trained and config.checkpointing:
            encoder.backbone.gradient_checkpointing_enable({"use_reentrant": False})
        return encoder.to(self.ranks.device).train(trained)

    def open_reranker(self, name: str) -> TorchReranker:
        """Opens the encoder's backbone as a reranker on the training device; all of it is trained."""
        config = self.recipe.encoders[name]
        torch.manual_seed(self.recipe.seed)
        reranker = TorchReranker.start(self.folder(name), config.max_length)
        if config.layers is not None:
            keep_layers(reranker.model, config.layers)
        if config.dropout is not None:
            set_dropout(reranker.model, config.dropout)
        if config.checkpointing:
            reranker.model.gradient_checkpointing_enable({"use_reentrant": False})
        return reranker.to(self.ranks.device).train()

    def keep(self, name: str, encoder: Trainable, folder: Path) -> None:
        """Writes the encoder, which is then the current one."""
        self.write(name, encoder, folder)
        self.replace(name, folder)

    def write(self, name: str, encoder: Trainable, folder: Path) -> None:
        """Writes the encoder, adapters merged; the folder is there whole or not at all.

        The adapters lie beside it in `NAME-adapter` as well: a few megabytes that turn what the stage began with into
        this encoder.
        """
        lora = self.recipe.encoders[name].lora
        if lora is not None and not isinstance(encoder, TorchReranker):
            # Merged in float32: a later stage merges into these weights again, and rounding would add up.
            plain = self._load(name, torch.float32)
            # No whole path: it is of this machine.
            base = {
                "name": "/".join(self.folder(name).parts[-2:]),
                "sha256": weights_digest(plain.backbone),
                "layers": plain.backbone.config.num_hidden_layers,
            }
            add_adapters(plain, lora)
            restore_trained(plain, {key: value.cpu() for key, value in trained_weights(encoder).items()})
            plain.backbone = plain.backbone.merge_and_unload()  # type: ignore[operator]
            _require_sound(name, plain)
            save_adapter(encoder, folder.with_name(f"{folder.name}-adapter"), base)
            encoder = plain
        else:
            _require_sound(name, encoder)
        _save(encoder, folder)

    def keep_sample(self, queries: Sequence[str], documents: NDArray[np.float16]) -> None:
        """Keeps queries and side-by-side vectors of documents, by which `fold` finds hubs."""
        new = self.sample.with_suffix(".new.npz")
        np.savez(new, queries=np.array([query[:QUERY_CHARACTERS] for query in queries]), documents=documents)
        new.replace(self.sample)

    def fold(self, name: str, folder: Path) -> dict[str, NDArray[Any]]:
        """Writes a query encoder in the recipe's dimensions, and returns the tensors that its documents need.

        It was trained to find side-by-side vectors. Its own are combinations of its projection's columns: in a basis of
        those all inner products are the same.
        """
        encoder = TorchEncoder.load(self.folder(name), self.spec(name))
        assert encoder.projection is not None
        columns = encoder.projection.weight.detach().numpy()[: encoder.spec.dim]
        matrix = joined.basis(columns, np.load(self.moments), self.recipe.dim)
        weight = torch.from_numpy(matrix.T @ columns)
        encoder.projection.weight, encoder.projection.out_features = nn.Parameter(weight), len(weight)
        encoder.spec = encoder.spec.model_copy(update={"native_dim": matrix.shape[1], "dim": matrix.shape[1]})
        _save(encoder, folder)
        with np.load(self.sample) as sample:
            documents, texts = sample["documents"].astype(np.float32) @ matrix, sample["queries"].tolist()
        documents /= np.linalg.norm(documents, axis=1, keepdims=True)
        reader, starts = TorchEncoder.load(folder), range(0, len(texts), AT_ONCE)
        queries = np.concatenate([reader.encode(texts[start : start + AT_ONCE], Side.QUERY) for start in starts])
        return {joined.WEIGHT: matrix, **Hubs.of(queries, documents).tensors()}

    def copy(self, name: str, folder: Path, tensors: dict[str, NDArray[Any]] | None = None) -> None:
        """Writes an encoder that was not trained, as the recipe uses it, with the one that stands beside it.

        `tensors` are those of `fold`, if there are any: what becomes of the vectors of such two.
        """
        config = self.recipe.encoders[name]
        encoder = self.open(name, trained=False).to(DTYPES[config.dtype])
        if config.beside is None:
            _save(encoder, folder)
            return
        second, unfinished = config.beside.encoder, folder.with_name(f"{folder.name}.unfinished")
        _save(encoder, unfinished)
        self.copy(second, unfinished / BESIDE)
        check = self.open(second, trained=False).encode(CHECK_TEXTS[:CHECKED], Side.DOCUMENT)
        side_by_side = {joined.WEIGHT: np.eye(self.recipe.dim_of(name), dtype=np.float32)}
        joined.put_beside(unfinished, config.beside.share, (tensors or side_by_side) | {joined.CHECK: check})
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)

    def has_new_projection(self, name: str) -> bool:
        """Tells whether the recipe asks for a projection that the encoder does not have yet."""
        return self.recipe.encoders[name].projection is not None and not (self.folder(name) / PROJECTION_FILE).is_file()

    def _load(self, name: str, dtype: torch.dtype) -> Adaptable:
        config, folder = self.recipe.encoders[name], self.folder(name)
        encoder: Adaptable
        if name in self.recipe.generators:
            encoder = TorchGenerator.load(folder, config.max_length, dtype=dtype)
        elif not self.has_new_projection(name):
            encoder = TorchEncoder.load(folder, self.spec(name), dtype=dtype)
            own = encoder.projection.hidden_units if encoder.projection is not None else 0
            if config.hidden not in (0, own):
                raise BadEncoder(
                    f"encoders.{name}.hidden: the projection in {folder} has {own} hidden units, not {config.hidden}; "
                    f"remove {PROJECTION_FILE} there to begin a new one, or leave hidden out"
                )
        else:
            spec = self.spec(name)
            width = read_config(folder).hidden_size
            bare = TorchEncoder.load(folder, spec.model_copy(update={"native_dim": width}), dtype=dtype)
            projection = Projection(width, spec.native_dim, hidden=config.hidden, dtype=dtype)
            encoder = TorchEncoder(bare.backbone, spec, bare.tokenizer_json, projection)
        if config.layers is not None:
            keep_layers(encoder.backbone, config.layers)
        return encoder


def _save(encoder: Trainable, folder: Path) -> None:
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    encoder.save(fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _require_sound(name: str, encoder: Trainable) -> None:
    """Refuses an encoder that training has ruined: weights, or the vectors that large ones give, are not finite."""
    wrong = not_finite(encoder)
    if wrong is None and isinstance(encoder, TorchEncoder):
        wrong = None if np.isfinite(encoder.encode(CHECK_TEXTS[:1], Side.QUERY)).all() else "a vector"
    if wrong is not None:
        raise BadEncoder(f"{name}: {wrong} is not finite after training: try a lower learning rate, in another --out")


def set_dropout(backbone: nn.Module, share: float) -> None:
    """Sets every dropout of an open backbone, including the shares that attention functions take as arguments."""
    for module in backbone.modules():
        if isinstance(module, nn.Dropout):
            module.p = share
        for name in ("attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, share)


def describe(config: Encoder) -> str:
    """Returns what of the encoder is trained, in a few words."""
    if config.lora is None:
        return "all weights"
    base = "8-bit" if config.bits == 8 else config.dtype
    return f"LoRA rank {config.lora.rank}, alpha {config.lora.alpha}, {base} base"
