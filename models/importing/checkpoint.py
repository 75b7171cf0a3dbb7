"""Turns a published checkpoint into an encoder or reranker folder: infers its settings and verifies them.

A source is a transformers or sentence-transformers folder, a GGUF file, or the id of a model on a hub. This is the only
place that interprets other people's checkpoints; code that comes with one is never run.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import nn
from transformers import (
    AutoModel,
    AutoTokenizer,
)

from models.encoder.folder import (
    CONFIG_FILE,
    SENTENCE_FILE,
    SentenceModule,
    infer_spec,
    needs_lengths,
    read_config,
    read_modules,
    read_object,
)
from models.encoder.gguf import unpack_gguf
from models.encoder.packed import joined
from models.encoder.packed.hubs import Hubs
from models.encoder.pairs import is_reranker
from models.encoder.spec import BESIDE, JOIN_FILE, SPEC_FILE, TOKENIZER_FILE, EncoderSpec, Pooling, Side, sha256_of
from models.encoder.staging import staging
from models.encoder.torch import (
    BASE_FILE,
    DTYPES,
    PROJECTION_FILE,
    Projection,
    TorchEncoder,
    keep_layers,
    merge_adapter,
    published_dtype,
    weights_digest,
)
from models.encoder.torch_reranker import is_sequence_classifier
from models.errors import BadEncoder, ParityError
from models.export.parity import AT_ONCE, CHECK_TEXTS, Vectors, row_cosines
from models.importing.options import ImportOptions
from models.importing.reranker import ImportedReranker, import_reranker

# The least cosine of any check text to the reference library's vector. Sums in another order cost 1e-6 in fp32; bf16
# weights, which both sides compute in fp32, cost nothing more.
FLOOR = 0.999
# Files of a hub's repository that an encoder may need: never code, never weights of other libraries.
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class Imported:
    """An encoder folder that was written, and how its vectors compare with the reference library's."""

    folder: Path
    spec: EncoderSpec
    parameters: int
    weight_bytes: int
    reference: str
    cosine: float
    worst: float
    texts_per_second: float
    similarity: str
    """How the checkpoint's vectors are compared if their lengths, which are 1 here, count there; else empty."""


def import_encoder(source: str, target: Path, options: ImportOptions) -> list[Imported] | ImportedReranker:
    """Writes `target`, or `target/query` and `target/document` for a sentence-transformers Router.

    A checkpoint that classifies sequences is a cross-encoder, and becomes a reranker folder.
    """
    if target.exists():
        raise BadEncoder(f"{target} is there already; give another folder, or remove it first")
    if options.beside is not None and options.adapter is None:
        raise BadEncoder("--beside names the second encoder of an --adapter whose documents were read by two")
    with staging(target) as work:
        folder = _fetch(source, work)
        modules = read_modules(folder)
        if modules and modules[0].kind == "Transformer" and modules[0].path:  # as sentence-transformers 1 wrote it
            folder = _flat(folder, folder, modules, work / "flat")
        name = options.space or _space(source)
        staged = work / "staged"
        if (folder / CONFIG_FILE).is_file() and is_sequence_classifier(folder):
            reranker = import_reranker(folder, staged, target, options)
            staged.rename(target)
            return reranker
        towers = router_towers(folder, work)
        if towers is None:
            done = [_import_one(folder, staged, target, options, name, (Side.QUERY, Side.DOCUMENT))]
        else:
            done = [
                _import_one(tower, staged / side, target / side, options, name, (side,))
                for side, tower in towers.items()
            ]
        staged.rename(target)
    return done


def _import_one(
    source: Path, staged: Path, final: Path, options: ImportOptions, space: str, sides: Sequence[Side]
) -> Imported:
    config = read_config(source)
    spec = infer_spec(
        source, space=space, pooling=options.pooling, dim=options.dim, max_length=options.max_length, sides=sides
    )
    names = ("query_instruction", "document_instruction")
    spec = spec.model_copy(update={name: value for name in names if (value := getattr(options, name)) is not None})
    # An adapter is merged first and rounded once.
    dtype = DTYPES[options.dtype] if options.dtype and options.adapter is None else published_dtype(config)
    encoder = TorchEncoder.load(source, spec, dtype=dtype)
    staged.mkdir(parents=True)
    encoder.save(staged)
    encoder = TorchEncoder.load(staged).float()
    # Sides without prompts of their own are one function.
    distinct = list({spec.instruction(side): side for side in sides}.values())
    started = time.perf_counter()
    found = {side: encoder.encode(CHECK_TEXTS, side, AT_ONCE) for side in distinct}
    seconds = time.perf_counter() - started
    if not all(np.isfinite(vectors).all() for vectors in found.values()):
        raise BadEncoder(f"{source}: gives vectors that are not finite: its weights hold infinite numbers, or overflow")
    if not all(vectors.any(axis=1).all() for vectors in found.values()):
        raise BadEncoder(f"{source}: gives vectors of zeros; fetch the checkpoint again, with its weights")
    try:
        reference, expected = _reference(source, spec, distinct)
    except IndexError as error:
        raise _other_tokens(source) from error
    cosines = np.concatenate([row_cosines(found[side], expected[side]) for side in distinct])
    mean, worst = float(cosines.mean()), float(cosines.min())
    # Written so that NaN, which compares false with everything, is refused too.
    if not worst >= FLOOR:
        raise ParityError(
            f"{source}: vectors differ from {reference}'s (cosine {mean:.5f} on average, {worst:.5f} at worst, floor "
            f"{FLOOR}); check --pooling, --query-instruction and --document-instruction against the model's card, "
            "and that the folder has all files of the tokenizer"
        )
    if options.adapter is not None:
        encoder = _adapt(source, spec, staged, options.adapter, options)
    return Imported(
        folder=final,
        spec=EncoderSpec.load(staged),
        parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        weight_bytes=sum(path.stat().st_size for path in staged.glob("*.safetensors")),
        reference=reference,
        cosine=mean,
        worst=worst,
        texts_per_second=len(CHECK_TEXTS) * len(distinct) / seconds,
        similarity=needs_lengths(source),
    )


def _adapt(source: Path, spec: EncoderSpec, staged: Path, adapter: Path, options: ImportOptions) -> TorchEncoder:
    """Turns the imported checkpoint into the encoder that was trained from it, without the one beside it."""
    own = EncoderSpec.load(adapter)
    # Older adapters have no checksums. Where there are some, a file without one is not the adapter's.
    used = {path.name for path in adapter.glob("*.safetensors")} | {"adapter_config.json"} if own.checksums else set()
    for name in sorted(used | own.checksums.keys()):
        if not (adapter / name).is_file() or sha256_of(adapter / name) != own.checksums.get(name):
            raise _damaged(adapter, name)
    if options.beside is None and options.space not in (None, own.space):
        own = joined.alone(own)  # a space of its own: not that of the two
    names = ("space", "dim", "max_length", "query_instruction", "document_instruction")
    own = own.model_copy(update={name: value for name in names if (value := getattr(options, name)) is not None})
    if (own.beside is None) != (options.beside is None):
        two = "by two encoders: name the second one with --beside (see its card), or another --space for one alone"
        raise BadEncoder(f"{adapter}: documents are read {two if own.beside else 'by one encoder: leave --beside out'}")
    if own.architecture != spec.architecture:
        raise BadEncoder(f"{adapter} was trained from a {own.architecture}, not from a {spec.architecture}")
    needed = read_object(adapter / BASE_FILE) or {}  # older adapters do not name their base
    layers = needed.get("layers", read_config(source).num_hidden_layers)
    # Of the source: what is staged may be rounded to the type that the checkpoint states.
    if needed and needed["sha256"] != weights_digest(keep_layers(TorchEncoder.load(source, spec).backbone, layers)):
        raise BadEncoder(
            f"{adapter} was trained on other weights than these: it needs those of {needed['name']}; if a stage of "
            "care train wrote them, take the encoder that lies beside the adapter, where both are merged"
        )
    base = TorchEncoder.load(staged)
    backbone = merge_adapter(keep_layers(base.backbone, layers), adapter)
    path = adapter / PROJECTION_FILE
    projection = Projection.load(path, torch.float32) if path.is_file() else base.projection
    shutil.rmtree(staged)
    merged = TorchEncoder(backbone, joined.alone(own), base.tokenizer_json, projection)
    nn.Module.to(merged.backbone, DTYPES[options.dtype or "float32"])
    merged.save(staged)
    if own.beside is not None:
        try:
            tensors = load_file(adapter / JOIN_FILE)
            matrix, check, hubs = tensors[joined.WEIGHT], tensors[joined.CHECK], Hubs.read(tensors)
        except (OSError, SafetensorError, KeyError) as error:
            raise _damaged(adapter, JOIN_FILE) from error
        # The matrix has its dimensions in the order of their weight, so fewer of them are the first.
        kept = {joined.WEIGHT: np.ascontiguousarray(matrix[:, : own.dim]), joined.CHECK: check}
        if hubs is not None:
            kept |= hubs.cut(own.dim).tensors()
        _put_beside(staged, str(options.beside), kept, own)
    return merged


def _damaged(adapter: Path, name: str) -> BadEncoder:
    return BadEncoder(f"{adapter}: {name} is missing or damaged; copy the adapter's folder again")


def _put_beside(staged: Path, source: str, tensors: dict[str, NDArray[Any]], spec: EncoderSpec) -> None:
    """Imports the second encoder into `beside`, and refuses another than the one that the adapter was trained with."""
    assert spec.beside is not None
    with staging(staged / BESIDE) as work:
        folder, check = _fetch(source, work), tensors[joined.CHECK]
        plain = ImportOptions(pooling=spec.beside.pooling, query_instruction="", document_instruction="")
        _import_one(folder, work / "staged", staged / BESIDE, plain, spec.space, (Side.DOCUMENT,))
        (work / "staged").rename(staged / BESIDE)
    found = TorchEncoder.load(staged / BESIDE).float().encode(CHECK_TEXTS[: len(check)], Side.DOCUMENT)
    worst = float(row_cosines(found, check).min()) if found.shape == check.shape else 0.0
    if not worst >= FLOOR:
        raise ParityError(
            f"--beside {source}: not the encoder that the adapter was trained with (cosine {worst:.5f}, floor {FLOOR})"
        )
    joined.put_beside(staged, spec.beside.share, tensors)


def _fetch(source: str, work: Path) -> Path:
    """Returns a folder with the checkpoint: the given one, an unpacked GGUF file, or what a hub has under this id."""
    path = Path(source)
    if path.is_dir():
        if (path / SPEC_FILE).is_file() or is_reranker(path):
            raise BadEncoder(f"{path} is an encoder folder already; care export makes graphs of it")
        return path
    if path.is_file() and path.suffix == ".gguf":
        return unpack_gguf(path, work / "gguf")
    if path.exists() or source.count("/") != 1 or source.startswith((".", "/")):
        raise BadEncoder(f"{source}: neither a folder, nor a .gguf file, nor a hub id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=list(HUB_FILES)))
    except RepositoryNotFoundError as error:
        raise BadEncoder(f"{source}: the hub has no such model, or HF_TOKEN may not read it") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise BadEncoder(f"{source}: no hub can be reached; fetch the folder elsewhere and give its path") from error


def _space(source: str) -> str:
    """Returns a name for the space of an encoder that shares it with no other."""
    path = Path(source).resolve()
    if path.parent.name == "snapshots":  # a hub's cache: models--owner--name/snapshots/revision
        return path.parent.parent.name.rsplit("--", 1)[-1]
    return path.name.removesuffix(".gguf") if path.exists() else source.rsplit("/", 1)[-1]


def _reference(source: Path, spec: EncoderSpec, sides: Sequence[Side]) -> tuple[str, dict[Side, Vectors]]:
    """Encodes by the checkpoint's own library: sentence-transformers if it is one of its folders."""
    prompts = {side: spec.instruction(side) for side in sides}
    if (source / "modules.json").is_file():
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(
            str(source), device="cpu", trust_remote_code=False, local_files_only=True, truncate_dim=spec.dim,
            model_kwargs={"dtype": torch.float32},
        )  # fmt: skip
        model.max_seq_length = spec.max_length
        vectors = {
            side: np.asarray(model.encode(list(CHECK_TEXTS), prompt=prompt, batch_size=AT_ONCE), dtype=np.float32)
            for side, prompt in prompts.items()
        }
        return "sentence-transformers", vectors
    return "transformers", {side: _plain_vectors(source, spec, prompt) for side, prompt in prompts.items()}


@torch.inference_mode()
def _plain_vectors(source: Path, spec: EncoderSpec, prompt: str) -> Vectors:
    """Encodes by transformers' own tokenizer and model, one text at a time, with a second pooling for the check."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except Exception as error:  # a tokenizer.json of another kind than the model's class reads
        raise _other_tokens(source) from error
    model = AutoModel.from_pretrained(source, local_files_only=True, dtype=torch.float32, config=read_config(source))
    if spec.pooling is Pooling.EOS and tokenizer.eos_token_id is None:
        raise _other_tokens(source)
    rows = []
    for text in CHECK_TEXTS:
        ids = tokenizer(prompt + text, truncation=True, max_length=spec.max_length)["input_ids"]
        if spec.pooling is Pooling.EOS and ids[-1] != tokenizer.eos_token_id:
            ids = [*ids[: spec.max_length - 1], tokenizer.eos_token_id]
        states = model.eval()(input_ids=torch.tensor([ids])).last_hidden_state[0].float()
        pooled = {Pooling.CLS: states[0], Pooling.EOS: states[-1], Pooling.MEAN: states.mean(dim=0)}[spec.pooling]
        rows.append(pooled[: spec.dim].numpy())
    return np.stack(rows)


def _other_tokens(source: Path) -> BadEncoder:
    return BadEncoder(
        f"{source}: transformers' tokenizer for this folder cannot be read, has tokens that the model lacks, or no "
        "eos_token; fetch tokenizer_config.json of the checkpoint, which names its class and its special tokens"
    )


def router_towers(folder: Path, work: Path) -> dict[Side, Path] | None:
    """Finds query and document tower of a sentence-transformers Router, as folders; None if it is no Router."""
    modules = read_modules(folder)
    if not modules or modules[0].kind not in ("Router", "Asym"):
        return None
    root = folder / modules[0].path
    stated = read_object(root / "router_config.json") or read_object(root / CONFIG_FILE) or {}
    try:
        routes = {
            side: [SentenceModule(stated["types"][name], name) for name in stated["structure"][side]] for side in Side
        }
    except (LookupError, TypeError) as error:
        raise BadEncoder(f"{folder}: a Router is read if it has the routes query and document") from error
    if set(stated["structure"]) != {*Side}:
        raise BadEncoder(f"{folder}: a Router is read if it has the routes query and document, and no other")
    return {side: _flat(folder, root, [*own, *modules[1:]], work / f"tower-{side}") for side, own in routes.items()}


def _flat(folder: Path, root: Path, modules: Sequence[SentenceModule], target: Path) -> Path:
    """Copies modules of a sentence-transformers folder, below `root` or itself, so that the first one is the folder."""
    if any(".." in Path(module.path).parts or Path(module.path).is_absolute() for module in modules):
        raise BadEncoder(f"{folder}: a module lies outside of the folder; this is not a published checkpoint")
    first, *rest = modules
    shutil.copytree(root / first.path, target)
    for module in rest:
        if found := next((base / module.path for base in (root, folder) if (base / module.path).is_dir()), None):
            shutil.copytree(found, target / module.path)
    listed = [{"idx": 0, "name": "0", "path": "", "type": first.type}]
    listed += [{"idx": n, "name": str(n), "path": each.path, "type": each.type} for n, each in enumerate(rest, start=1)]
    (target / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    for name in (SENTENCE_FILE, TOKENIZER_FILE, "tokenizer_config.json"):
        if (folder / name).is_file() and not (target / name).exists():
            shutil.copyfile(folder / name, target / name)
    return target
