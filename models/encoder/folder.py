"""Reads a transformers folder as a hub publishes it: its backbone, its pooling and its tokenizer.

Reads the JSON files only, and never runs code that came with a checkpoint: what needs it is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.processors import Sequence as ProcessorSequence
from tokenizers.processors import TemplateProcessing
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig

from models.encoder.spec import INSTRUCTION, SPEC_FILE, TEMPLATE, TOKENIZER_FILE, EncoderSpec, Pooling, Side, fault
from models.errors import BadEncoder

CONFIG_FILE = "config.json"
SENTENCE_FILE = "config_sentence_transformers.json"
# How checkpoints name the prompt before documents; the first that is not empty counts.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
DEFAULT_MAX_LENGTH = 512
# Causal models see the whole text only at its last token, so there is nothing to ask.
DECODERS = frozenset({"qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3_text", "gpt_neox"})
# How configurations of decoders say that tokens attend to later ones, too.
BIDIRECTIONAL = {
    "is_causal": False, "is_bidirectional": True, "bidirectional": True, "use_bidirectional_attention": True,
}  # fmt: skip
# Their position table starts after the padding id.
ROBERTA_LIKE = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl"})
SENTENCE_POOLING = {"cls": Pooling.CLS, "cls_token": Pooling.CLS, "mean": Pooling.MEAN, "mean_tokens": Pooling.MEAN,
                    "lasttoken": Pooling.EOS}  # fmt: skip
# A query prompt that names a task, as those of instruction-tuned encoders do.
TASK_PROMPT = re.compile(r"(Instruct: ?)?[^\n]+(\n+Query: ?)")
SENTENCE_MODULES = ("Transformer", "Pooling", "Normalize", "Dense")
# Files that may hold a vocabulary. Without any, transformers makes a tokenizer that has only special tokens.
VOCABULARIES = (TOKENIZER_FILE, "vocab.txt", "vocab.json", "*.model")


def read_config(folder: Path) -> PretrainedConfig:
    """Reads the backbone's configuration, as a class that transformers has natively."""
    values = read_json(folder / CONFIG_FILE)
    if not isinstance(values, dict):
        raise BadEncoder(
            f"{folder}: {CONFIG_FILE} is missing or not an object; give a folder with transformers weights"
        )
    model_type = values.get("model_type")
    if model_type == "new":
        values = gte_values(values)
        model_type = "gte"
    if model_type not in CONFIG_MAPPING:
        raise BadEncoder(f"{folder}: transformers has no native class for model_type {model_type!r}")
    _require_native(folder, values)
    values = _with_attention(values)
    try:
        config = AutoConfig.for_model(str(model_type), **{k: v for k, v in values.items() if k != "model_type"})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise BadEncoder(f"{folder}: {CONFIG_FILE} does not describe a {model_type}: {error}") from error
    if not hasattr(config, "max_position_embeddings"):
        raise BadEncoder(
            f"{folder}: a {model_type} cannot be an encoder here: it does not say how many tokens it can read"
        )
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _require_native(folder: Path, values: dict[str, Any]) -> None:
    """Refuses a checkpoint whose own code computes something else than transformers' class does."""
    model_type = values["model_type"]
    cure = f"if transformers' own {model_type} computes the same vectors, remove it from {CONFIG_FILE}"
    if values.get("auto_map"):
        raise BadEncoder(f"{folder}: the checkpoint brings code of its own (auto_map), which is never run; {cure}")
    unknown = [name for name in values.get("architectures") or () if not hasattr(transformers, name)]
    if unknown:
        raise BadEncoder(f"{folder}: transformers has no class {unknown[0]} (architectures); {cure}")


def _with_attention(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration with one fact about where a decoder's attention looks, in the words of transformers."""
    if values["model_type"] not in DECODERS:
        return values
    ahead = any(values.get(name) == value for name, value in BIDIRECTIONAL.items())
    if ahead and values["model_type"] not in ("gemma3_text", "llama", "mistral", "qwen2", "qwen3"):
        raise BadEncoder(
            f"a {values['model_type']} whose attention looks ahead is not supported; take a causal checkpoint"
        )
    kept = {name: value for name, value in values.items() if name not in BIDIRECTIONAL}
    own = "use_bidirectional_attention" if values["model_type"] == "gemma3_text" else "is_causal"
    return kept | {own: BIDIRECTIONAL[own]} if ahead else kept


def looks_back_only(config: PretrainedConfig) -> bool:
    """Returns whether a token attends to those before it alone."""
    ahead = getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True)
    return config.model_type in DECODERS and not ahead


def gte_values(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a checkpoint of the remote class `NewModel`, for transformers' own `GteModel`.

    The remote class scales its rotary frequencies by NTK: with factor f the base grows to theta · f and every
    frequency is divided by f ** (2 / head_dim). Linear scaling of the grown base is the same function.
    """
    unsupported = {"layer_norm_type": "layer_norm", "position_embedding_type": "rope", "logn_attention_scale": False,
                   "pack_qkv": True}  # fmt: skip
    for key, needed in unsupported.items():
        if values.get(key, needed) != needed:
            raise BadEncoder(f"{CONFIG_FILE}: {key} {values[key]!r} is not supported by GteModel, only {needed!r}")
    theta = float(values.get("rope_theta", 10000.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    scaling = values.get("rope_scaling")
    if scaling is not None:
        kind = scaling.get("type", scaling.get("rope_type"))
        if kind != "ntk" or scaling.get("mixed_b") is not None:
            raise BadEncoder(f"{CONFIG_FILE}: rope_scaling {scaling!r} is not supported, only ntk without mixed_b")
        factor = float(scaling["factor"])
        head_dim = values["hidden_size"] // values["num_attention_heads"]
        rope = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / head_dim)}
    dropped = {"architectures", "auto_map", "rope_theta", "rope_scaling", "torch_dtype", "dtype", *unsupported,
               "logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention"}  # fmt: skip
    kept = {key: value for key, value in values.items() if key not in dropped}
    return kept | {"model_type": "gte", "rope_parameters": rope}


def infer_spec(
    folder: Path,
    *,
    space: str,
    pooling: Pooling | None = None,
    dim: int | None = None,
    max_length: int | None = None,
    sides: Sequence[Side] = (Side.QUERY, Side.DOCUMENT),
) -> EncoderSpec:
    """Infers the spec of a transformers folder from its own and sentence-transformers' files, where not given."""
    config = read_config(folder)
    layers = dense_layers(folder)
    width = layers[-1].dim if layers else config.hidden_size
    settings = read_object(folder / SENTENCE_FILE) or {}
    stated = settings.get("prompts") or {}
    prompts = [
        next((stated[name] for name in names if stated.get(name)), "") for names in (("query",), DOCUMENT_PROMPTS)
    ]
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise BadEncoder(f"{folder / SENTENCE_FILE}: prompts must be texts")
    form = TASK_PROMPT.fullmatch(prompts[0])
    try:
        return EncoderSpec(
            architecture=config.model_type,
            sides=tuple(sides),
            pooling=pooling or _pooling(folder, config),
            native_dim=width,
            dim=dim or settings.get("truncate_dim") or width,
            max_length=_max_length(folder, config) if max_length is None else max_length,
            query_instruction=prompts[0],
            document_instruction=prompts[1],
            query_template=(form[1] or "") + INSTRUCTION + form[2] if form else TEMPLATE,
            space=space,
        )
    except ValidationError as error:
        raise BadEncoder(f"{folder}: {fault(error)}") from error


def read_tokenizer(folder: Path, pooling: Pooling, config: PretrainedConfig) -> str:
    """Reads the text of a `tokenizer.json` for the folder; for EOS pooling it is one that ends each text with EOS."""
    path = folder / TOKENIZER_FILE
    # tokenizer_config.json may overrule tokenizer.json (lower-casing, for one), and only transformers knows how.
    overruled = (folder / "tokenizer_config.json").is_file() and not (folder / SPEC_FILE).is_file()
    if not any(True for pattern in VOCABULARIES for _ in folder.glob(pattern)):
        raise BadEncoder(f"{folder}: no vocabulary ({', '.join(VOCABULARIES)}); fetch the whole checkpoint")
    try:
        if path.is_file() and not overruled:
            backend = RustTokenizer.from_file(str(path))
        else:
            backend = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # the libraries raise plain Exception, among others
        raise BadEncoder(f"{folder}: no tokenizer that transformers can read ({TOKENIZER_FILE})") from error
    # Not counted: tokens that transformers adds by itself, such as [MASK]. No text uses them.
    last = max(backend.get_vocab(with_added_tokens=False).values(), default=0)
    if last >= config.vocab_size:
        raise BadEncoder(
            f"{folder}: the tokenizer has a token {last}, the backbone {config.vocab_size} of them;"
            " give it the tokenizer that it was trained with"
        )
    backend.no_padding()
    backend.no_truncation()
    if pooling is Pooling.EOS and not any(backend.encode("a").special_tokens_mask[-1:]):
        _append_eos(backend, config, folder)
    return str(backend.to_str())


def _append_eos(backend: RustTokenizer, config: PretrainedConfig, folder: Path) -> None:
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    token = None if eos is None else backend.id_to_token(eos)
    if token is None:
        raise BadEncoder(f"{folder}: EOS pooling needs eos_token_id in {CONFIG_FILE}")
    # What a template before it put at the beginning counts as the first of two texts.
    ending = TemplateProcessing(single=f"$A {token}", pair=f"$A $B {token}", special_tokens=[(token, eos)])
    before = backend.post_processor
    backend.post_processor = ending if before is None else ProcessorSequence([before, ending])


class DenseLayer(NamedTuple):
    """A Dense module of a sentence-transformers folder."""

    folder: Path
    width: int
    dim: int
    has_bias: bool
    activation: str

    def tensors(self) -> dict[str, Any]:
        """Returns `weight` and, if the layer has one, `bias`."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.folder / "model.safetensors"
        if not path.is_file():
            raise BadEncoder(f"{path} is missing; fetch the whole checkpoint, with safetensors weights")
        try:
            found = {name.removeprefix("linear."): tensor for name, tensor in load_file(path).items()}
        except SafetensorError as error:
            raise BadEncoder(f"{path} is damaged; fetch it again") from error
        shapes = {"weight": (self.dim, self.width)} | ({"bias": (self.dim,)} if self.has_bias else {})
        if {name: tuple(tensor.shape) for name, tensor in found.items()} != shapes:
            raise BadEncoder(f"{path}: not the weights of {CONFIG_FILE} beside it; fetch the checkpoint again")
        return found


class SentenceModule(NamedTuple):
    """A line of modules.json of a sentence-transformers folder; `path` is the module's folder, relative."""

    type: str
    path: str

    @property
    def kind(self) -> str:
        return self.type.rsplit(".", 1)[-1]


def read_modules(folder: Path) -> list[SentenceModule]:
    """Reads the modules of a sentence-transformers folder in order; none of another folder."""
    stated = read_json(folder / "modules.json") or []
    try:
        return [
            SentenceModule(each["type"], each.get("path", f"{place}_{each['type'].rsplit('.', 1)[-1]}"))
            for place, each in enumerate(stated)
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise BadEncoder(f"{folder}: modules.json is not a list of modules; fetch the checkpoint again") from error


def dense_layers(folder: Path) -> list[DenseLayer]:
    """Returns the dense layers between pooling and norm, in order."""
    layers = []
    for place in _modules(folder, "Dense"):
        stated = read_object(place / CONFIG_FILE)
        if stated is None:
            raise BadEncoder(f"{place / CONFIG_FILE} of the Dense layer is missing; fetch the whole checkpoint")
        activation = str(stated.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
        if activation not in ("Identity", "ReLU", "Tanh") or stated.get("use_residual"):
            raise BadEncoder(f"{place}: a dense layer with {activation} is not supported, only Identity, ReLU and Tanh")
        width, dim = stated.get("in_features"), stated.get("out_features")
        if not isinstance(width, int) or not isinstance(dim, int):
            raise BadEncoder(f"{place / CONFIG_FILE} lacks in_features or out_features; fetch the checkpoint again")
        layers.append(DenseLayer(place, width, dim, bool(stated.get("bias", True)), activation))
    return layers


def _modules(folder: Path, kind: str) -> list[Path]:
    """Folders of the modules of this kind by modules.json."""
    found = []
    for module in read_modules(folder):
        if module.kind not in SENTENCE_MODULES:
            raise BadEncoder(f"{folder}: modules.json has {module.type}, which an encoder here cannot hold")
        if module.kind == kind:
            found.append(folder / module.path)
    return found


def _pooling(folder: Path, config: PretrainedConfig) -> Pooling:
    places = _modules(folder, "Pooling") or [folder / "1_Pooling"]
    stated = read_object(places[0] / CONFIG_FILE)
    if stated is None:
        if looks_back_only(config):
            return Pooling.EOS
        cure = "give pooling cls or mean (care encoder import --pooling cls; care eval --encoder FOLDER,pooling=cls)"
        raise BadEncoder(f"{folder} does not say how it is pooled (1_Pooling/{CONFIG_FILE}); {cure}")
    modes = [name.removeprefix("pooling_mode_") for name, on in stated.items() if "pooling_mode_" in name and on]
    modes = modes or [str(stated.get("pooling_mode"))]
    if len(modes) != 1 or modes[0] not in SENTENCE_POOLING:
        raise BadEncoder(f"{folder}: pooling {' + '.join(modes)} is not supported, only cls, mean or lasttoken")
    return SENTENCE_POOLING[modes[0]]


def check_length(folder: Path, config: PretrainedConfig, max_length: int) -> None:
    """Refuses more tokens than the backbone has positions."""
    if max_length > positions_of(config):
        raise BadEncoder(
            f"{folder}: max_length {max_length} is more than the backbone's {positions_of(config)} positions"
        )


def positions_of(config: PretrainedConfig) -> int:
    """Returns how many tokens the backbone can read."""
    positions: int = config.max_position_embeddings
    return positions - config.pad_token_id - 1 if config.model_type in ROBERTA_LIKE else positions


def _max_length(folder: Path, config: PretrainedConfig) -> int:
    stated = []
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        value = (read_object(folder / name) or {}).get(key) or DEFAULT_MAX_LENGTH
        if not isinstance(value, int | float):
            raise BadEncoder(f"{folder / name}: {key} is {value!r}, not a number; correct it or remove it")
        stated.append(value)
    return int(min(positions_of(config), DEFAULT_MAX_LENGTH, *stated))


def needs_lengths(folder: Path) -> str:
    """Returns the checkpoint's similarity function if it depends on lengths of vectors; empty if it is cosine."""
    stated = str((read_object(folder / SENTENCE_FILE) or {}).get("similarity_fn_name") or "cosine")
    return "" if stated == "cosine" or _modules(folder, "Normalize") else stated


def read_object(path: Path) -> dict[str, Any] | None:
    """Reads the object of a JSON file; None if there is no such file."""
    value = read_json(path)
    if value is None or isinstance(value, dict):
        return value
    raise BadEncoder(f"{path} holds no JSON object; fetch the checkpoint again")


def read_json(path: Path) -> Any:  # noqa: ANN401 - JSON is what it is
    """Reads the content of a JSON file; None if there is no such file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise BadEncoder(f"{path} is not JSON: {error}") from error
