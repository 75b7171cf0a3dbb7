"""Tiny random encoders of every architecture, and a tokenizer for them, made in code: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    GPTNeoXConfig,
    GteConfig,
    ModernBertConfig,
    PretrainedConfig,
    Qwen3Config,
    XLMRobertaConfig,
)

from models.encoder.spec import EncoderSpec, Pooling, Side
from models.encoder.torch import TorchEncoder
from models.export.parity import CALIBRATION_TEXTS, CHECK_TEXTS

ARCHITECTURES = ("bert", "xlm-roberta", "modernbert", "gte", "qwen3")
PAD, UNK, CLS, SEP = range(4)
WIDTH = 64
MAX_LENGTH = 48


def tiny_tokenizer(*, bare: bool = False) -> Tokenizer:
    """Makes a tokenizer with one token per character between [CLS] and [SEP]; a bare one adds none, as for decoders."""
    characters = sorted(set("".join((*CHECK_TEXTS, *CALIBRATION_TEXTS)).lower()))
    vocabulary = {token: row for row, token in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", *characters))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Split("", "isolated")
    if not bare:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
        )
    return tokenizer


def tiny_config(architecture: str, layers: int = 2) -> PretrainedConfig:
    """Makes a model of few layers, with weights large enough that different texts get clearly different embeddings."""
    shape = {
        "vocab_size": tiny_tokenizer().get_vocab_size(),
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": MAX_LENGTH + 1 if architecture == "xlm-roberta" else MAX_LENGTH,
        "initializer_range": 0.15,
        "pad_token_id": PAD,
        "bos_token_id": CLS,
        "eos_token_id": SEP,
    }
    if architecture == "bert":
        return BertConfig(**shape)
    if architecture == "xlm-roberta":
        return XLMRobertaConfig(**shape, type_vocab_size=1)
    if architecture == "modernbert":
        rope = {"full_attention": _rope(500.0), "sliding_attention": _rope(100.0)}
        local = {"local_attention": 8, "global_attn_every_n_layers": 2, "rope_parameters": rope}
        return ModernBertConfig(**shape, **local, cls_token_id=CLS, sep_token_id=SEP)
    if architecture == "gte":
        return GteConfig(**shape, rope_parameters=_rope(300.0))
    if architecture == "gpt_neox":
        return GPTNeoXConfig(**shape, use_cache=False, rope_parameters=_rope(200.0))
    heads = {"num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
    return Qwen3Config(**shape, **heads, rope_parameters=_rope(200.0))


def _rope(theta: float) -> dict[str, object]:
    """Returns settings that differ from the defaults, so that a reader that ignores them fails."""
    return {"rope_type": "default", "rope_theta": theta}


def tiny_spec(architecture: str, pooling: Pooling | None = None, dim: int = WIDTH) -> EncoderSpec:
    return EncoderSpec(
        architecture=architecture,
        sides=(Side.QUERY, Side.DOCUMENT),
        pooling=pooling or (Pooling.EOS if architecture == "qwen3" else Pooling.CLS),
        native_dim=WIDTH,
        dim=dim,
        max_length=MAX_LENGTH,
        space="tiny",
    )


def tiny_encoder(architecture: str, pooling: Pooling | None = None, dim: int = WIDTH, seed: int = 0) -> TorchEncoder:
    torch.manual_seed(seed)
    config = tiny_config(architecture)
    options = {"add_pooling_layer": False} if architecture in ("bert", "xlm-roberta") else {}
    backbone = AutoModel.from_config(config, **options)
    return TorchEncoder(backbone, tiny_spec(architecture, pooling, dim), tiny_tokenizer().to_str()).eval()


def write_checkpoint(folder: Path, architecture: str, *, bare: bool = False) -> None:
    """Writes a transformers folder as published: weights, config and tokenizer, no encoder.json."""
    tiny_encoder(architecture).backbone.save_pretrained(folder)
    tiny_tokenizer(bare=bare).save(str(folder / "tokenizer.json"))


def write_cross_encoder(folder: Path, architecture: str, labels: int = 1, **changes: object) -> None:
    """Writes a published cross-encoder: a sequence classifier, and a tokenizer that joins two texts."""
    torch.manual_seed(1)
    config = tiny_config(architecture)
    config.num_labels = labels
    for name, value in changes.items():
        setattr(config, name, value)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    between = "[SEP]" if architecture == "bert" else "[SEP] [SEP]"
    second = "$B:1 [SEP]:1" if architecture == "bert" else "$B [SEP]"
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair=f"[CLS] $A {between} {second}", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if architecture == "bert" else [])]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_input_names": inputs}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_new_checkpoint(
    folder: Path, config: PretrainedConfig | None = None, tokenizer: Tokenizer | None = None, theta: int = 300
) -> TorchEncoder:
    """Writes a checkpoint of gte's remote class, with NTK-scaled positions; returns the same weights in GteModel.

    The remote class packs query, key and value into one weight, up and gate into another, and uses other layer names.
    A head that no encoder uses is included, as in the published checkpoint.
    """
    config, tokenizer = config or tiny_config("gte"), tokenizer or tiny_tokenizer()
    factor = 8 ** (2 / (config.hidden_size // config.num_attention_heads))
    config.rope_parameters = {"rope_type": "linear", "rope_theta": theta * 8.0, "factor": factor}
    torch.manual_seed(0)
    backbone = AutoModel.from_config(config)
    weights = {"classifier.weight": torch.zeros(1, config.hidden_size), "classifier.bias": torch.zeros(1)}
    for name, tensor in backbone.state_dict().items():
        weights[f"new.{name.replace('layers.', 'encoder.layer.')}"] = tensor
    for layer in range(config.num_hidden_layers):
        prefix = f"new.encoder.layer.{layer}"
        for kind in ("weight", "bias"):
            parts = [weights.pop(f"{prefix}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            weights[f"{prefix}.attention.qkv_proj.{kind}"] = torch.cat(parts)
            weights[f"{prefix}.attention.o_proj.{kind}"] = weights.pop(f"{prefix}.self_attn.o_proj.{kind}")
            weights[f"{prefix}.attn_ln.{kind}"] = weights.pop(f"{prefix}.post_attention_layernorm.{kind}")
            weights[f"{prefix}.mlp_ln.{kind}"] = weights.pop(f"{prefix}.post_mlp_layernorm.{kind}")
        parts = [weights.pop(f"{prefix}.mlp.{part}_proj.weight") for part in ("up", "gate")]
        weights[f"{prefix}.mlp.up_gate_proj.weight"] = torch.cat(parts)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = {
        "architectures": ["NewModel", "NewForTokenClassification"],
        "auto_map": {"AutoModel": "elsewhere--modeling.NewModel"},
        "model_type": "new",
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_scaling": {"factor": 8.0, "type": "ntk"},
        "rope_theta": theta,
        "torch_dtype": "float16",
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }
    shape = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    values |= {name: getattr(config, name) for name in (*shape, "max_position_embeddings", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(values))
    tokenizer.save(str(folder / "tokenizer.json"))
    return TorchEncoder(backbone, tiny_spec("gte"), tokenizer.to_str()).eval()
