"""Toy training data: random encoders of one or two layers, and a handful of rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GemmaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2Tokenizer,
)

from models.encoder.spec import Pooling
from models.encoder.torch import TorchEncoder
from models.export.parity import CHECK_TEXTS
from models.training.ranks import Ranks
from models.training.recipe import Recipe
from tests.support.tiny_models import tiny_config, tiny_spec, tiny_tokenizer, write_new_checkpoint

ONE = Ranks(0, 1, torch.device("cpu"))
_KNOWN = sorted({character for text in CHECK_TEXTS for character in text if "一" <= character <= "龥"})
SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
         "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")  # fmt: skip
TOPICS = ["".join(_KNOWN[row : row + 3]) for row in range(0, 36, 3)]
QUERIES = [f"{topic}怎么办" for topic in TOPICS]
DOCUMENTS = [f"{topic}的治疗和护理。{topic[::-1]}也要注意。" for topic in TOPICS]


def toy_tokenizer(*, bare: bool = False) -> Tokenizer:
    tokenizer = tiny_tokenizer(bare=bare)
    tokenizer.add_special_tokens(["[MASK]"])
    return tokenizer


def toy_config(architecture: str, layers: int = 2) -> PretrainedConfig:
    if architecture == "gemma":
        shape = {name: getattr(tiny_config("bert", layers), name) for name in SHAPE}
        return GemmaConfig(**shape | {"vocab_size": shape["vocab_size"] + 1}, num_key_value_heads=1, head_dim=16)
    config = tiny_config(architecture, layers)
    config.vocab_size += 1
    return config


def write_start(folder: Path, architecture: str, seed: int = 0, layers: int = 2) -> Path:
    """Writes a transformers folder as published: gte in its remote class's layout, decoders with their head."""
    if architecture == "new":
        write_new_checkpoint(folder, toy_config("gte", layers), toy_tokenizer())
        return folder
    torch.manual_seed(seed)
    decoder = architecture.startswith(("qwen", "gemma", "gpt"))
    if decoder:
        AutoModelForCausalLM.from_config(toy_config(architecture, layers)).save_pretrained(folder)
    else:
        options = {"add_pooling_layer": False} if architecture in ("bert", "xlm-roberta") else {}
        AutoModel.from_config(toy_config(architecture, layers), **options).save_pretrained(folder)
    toy_tokenizer(bare=decoder).save(str(folder / "tokenizer.json"))
    return folder


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_chat_start(folder: Path) -> Path:
    """Writes a transformers folder of a chat model: a Qwen2 with random weights and one token per byte."""
    torch.manual_seed(0)
    tokens = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_end|>"]
    config = Qwen2Config(
        vocab_size=len(tokens), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=512, initializer_range=0.15, eos_token_id=len(tokens) - 1,
        bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    Qwen2Tokenizer(vocabulary, [], eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    return folder


def toy_encoder(architecture: str, seed: int = 0, **changes: object) -> TorchEncoder:
    """Makes an encoder in memory; its dropout is off by default."""
    torch.manual_seed(seed)
    config = toy_config(architecture)
    for name, value in changes.items():
        setattr(config, name, value)
    options = {"add_pooling_layer": False} if architecture in ("bert", "xlm-roberta") else {}
    return TorchEncoder(AutoModel.from_config(config, **options), tiny_spec(architecture), toy_tokenizer().to_str())


def toy_rows(source: str = "toy") -> list[dict[str, object]]:
    """Makes a pair for each topic, with two negatives and a hypothetical document."""
    return [
        {
            "query": query,
            "pos": [DOCUMENTS[row]],
            "neg": [DOCUMENTS[row - 1], DOCUMENTS[row - 2]],
            "source": source,
            "hypothetical": [f"{TOPICS[row]}治疗"],
        }
        for row, query in enumerate(QUERIES)
    ]


def write_rows(path: Path, rows: Iterable[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def plain(rows: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    """Returns the rows without hypothetical documents."""
    return [{key: value for key, value in row.items() if key != "hypothetical"} for row in rows]


def write_dev(folder: Path) -> None:
    """Writes a development set in which each query has its document."""
    write_rows(folder / "set" / "corpus.jsonl", [{"_id": f"d{n}", "text": text} for n, text in enumerate(DOCUMENTS)])
    write_rows(folder / "set" / "queries.jsonl", [{"_id": f"q{n}", "text": text} for n, text in enumerate(QUERIES)])
    lines = ["query-id\tcorpus-id\tscore", *(f"q{n}\td{n}\t1" for n in range(len(QUERIES)))]
    (folder / "set" / "qrels.tsv").write_text("\n".join(lines) + "\n")


def recipe_toml(recipe: Recipe) -> str:
    """Writes the tables of a recipe as inline TOML, which is JSON with other signs."""
    values = recipe.model_dump(mode="json", exclude_none=True)

    def inline(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {inline(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(inline, value)) + "]"
        return json.dumps(value)

    return "".join(f"{key} = {inline(value)}\n" for key, value in values.items())


def write_gguf(path: Path, chat_template: str | None = None) -> TorchEncoder:
    """Writes a GGUF file of a Qwen2 with random weights and a byte-level tokenizer; returns the same weights."""
    torch.manual_seed(5)
    tokens = [*sorted(ByteLevel.alphabet()), "çļ", "çļĦ", "<|endoftext|>"]
    config = Qwen2Config(
        vocab_size=len(tokens), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-6, tie_word_embeddings=True, initializer_range=0.15,
    )  # fmt: skip
    model = AutoModel.from_config(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, "qwen2")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["ç ļ", "çļ Ħ"])
    writer.add_eos_token_id(len(tokens) - 1)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec = tiny_spec("qwen2", Pooling.EOS).model_copy(update={"max_length": 64})
    return TorchEncoder(model, spec, toy_tokenizer().to_str()).eval()


def _gguf_name(name: str) -> str:
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "layers": "blk", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
             "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
             }  # fmt: skip
    parts = (names.get(part, part) for part in name.split(".") if part not in ("self_attn", "mlp"))
    return ".".join(parts)
