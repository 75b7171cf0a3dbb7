"""Published transformers folders: what is inferred, converted and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from models.encoder.folder import gte_values, infer_spec, looks_back_only, read_config, read_tokenizer
from models.encoder.spec import Pooling, Side
from models.encoder.tokenizer import Tokenizer
from models.encoder.torch import PROJECTION_FILE, Projection, TorchEncoder
from models.errors import BadEncoder
from models.export.parity import CHECK_TEXTS
from models.training.shapes import bare_model
from tests.support.tiny_models import CLS, MAX_LENGTH, SEP, tiny_spec, tiny_tokenizer, write_checkpoint
from tests.support.tiny_models import write_new_checkpoint as write_new


def write_json(path: Path, values: Any) -> None:  # noqa: ANN401
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values), encoding="utf-8")


def test_a_checkpoint_of_the_remote_gte_class_loads_natively(tmp_path: Path) -> None:
    native = write_new(tmp_path)
    loaded = TorchEncoder.load(tmp_path, tiny_spec("gte"))
    assert type(loaded.backbone).__name__ == "GteModel"
    texts = CHECK_TEXTS[:20]
    np.testing.assert_allclose(loaded.encode(texts, Side.QUERY), native.encode(texts, Side.QUERY), atol=1e-6)
    loaded.save(tmp_path / "saved")
    again = TorchEncoder.load(tmp_path / "saved")
    np.testing.assert_array_equal(again.encode(texts, Side.QUERY), loaded.encode(texts, Side.QUERY))


def test_rotary_frequencies_of_the_remote_gte_class_use_ntk_scaling(tmp_path: Path) -> None:
    write_new(tmp_path)
    loaded = TorchEncoder.load(tmp_path, tiny_spec("gte"))
    theta, factor, head_dim = 300.0, 8.0, 16
    powers = torch.arange(0, head_dim, 2) / head_dim
    expected = 1 / (theta * factor) ** powers / factor ** (2 / head_dim)
    torch.testing.assert_close(loaded.backbone.rotary_emb.inv_freq, expected)


def test_the_published_scaling_of_gte_multilingual_base_is_read() -> None:
    values = {"hidden_size": 768, "num_attention_heads": 12, "rope_theta": 20000, "model_type": "new"}
    converted = gte_values(values | {"rope_scaling": {"type": "ntk", "factor": 8.0}})
    expected = {"rope_type": "linear", "rope_theta": 160000.0, "factor": 8 ** (2 / 64)}
    assert converted["rope_parameters"] == expected
    assert gte_values(values)["rope_parameters"] == {"rope_type": "default", "rope_theta": 20000.0}


@pytest.mark.parametrize(
    "change",
    [
        {"position_embedding_type": "absolute"},
        {"layer_norm_type": "rms_norm"},
        {"logn_attention_scale": True},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}},
    ],
)
def test_options_that_gtemodel_lacks_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadEncoder, match="not supported"):
        gte_values({"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 300, **change})


def test_an_architecture_without_a_native_class_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "home_made", "auto_map": {"AutoModel": "x.Y"}})
    with pytest.raises(BadEncoder, match="home_made"):
        read_config(tmp_path)
    with pytest.raises(BadEncoder, match="missing"):
        read_config(tmp_path / "nowhere")


@pytest.mark.parametrize("architecture", ["bert", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"auto_map": {"AutoModel": "elsewhere--modeling.Own"}}, r"code of its own \(auto_map\).*remove it"),
        ({"architectures": ["Qwen2BiModel"]}, r"no class Qwen2BiModel \(architectures\)"),
    ],
)
def test_a_checkpoint_that_needs_its_own_code_is_refused(
    architecture: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "qwen3" if architecture == "qwen2" else architecture)
    values = json.loads((tmp_path / "config.json").read_text()) | {"model_type": architecture}
    write_json(tmp_path / "config.json", values | change)
    with pytest.raises(BadEncoder, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize(
    "change", [{"is_causal": False}, {"use_bidirectional_attention": True}, {"is_bidirectional": True}]
)
def test_a_bidirectional_decoder_is_loaded_as_bidirectional(
    architecture: str, change: dict[str, Any], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "qwen3")
    values = json.loads((tmp_path / "config.json").read_text()) | {"model_type": architecture}
    write_json(tmp_path / "config.json", values | change)
    assert not looks_back_only(read_config(tmp_path))
    write_json(tmp_path / "config.json", values | {name: not value for name, value in change.items()})
    assert looks_back_only(read_config(tmp_path))


def test_bidirectional_attention_also_applies_to_texts_of_one_length(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    values = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", values | {"is_causal": False})
    encoder = TorchEncoder.load(tmp_path, tiny_spec("qwen3", Pooling.CLS))
    # Without looking ahead the first token would not see what follows it.
    one, two = encoder.encode(["感冒发烧", "感冒头痛"], Side.QUERY)
    assert np.dot(one, two) < 0.999
    np.testing.assert_allclose(encoder.encode(["感冒发烧", "感"], Side.QUERY)[0], one, atol=1e-5)


def test_a_bidirectional_gpt_neox_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "gpt_neox", "is_causal": False})
    with pytest.raises(BadEncoder, match="gpt_neox whose attention looks ahead is not supported"):
        read_config(tmp_path)


def test_sentence_transformers_files_are_used(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Normalize")]
    write_json(tmp_path / "modules.json", modules)
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    write_json(tmp_path / "1_Pooling" / "config.json", pooling)
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 24})
    write_json(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "query: ", "document": ""}})
    spec = infer_spec(tmp_path, space="s")
    assert (spec.pooling, spec.max_length, spec.dim) == (Pooling.MEAN, 24, 64)
    assert (spec.query_instruction, spec.document_instruction) == ("query: ", "")
    write_json(tmp_path / "config_sentence_transformers.json", {"prompts": {"passage": "passage: "}})
    assert infer_spec(tmp_path, space="s").document_instruction == "passage: "
    write_json(tmp_path / "config_sentence_transformers.json", {"prompts": {"query": "Instruct: Find it.\nQuery:"}})
    assert infer_spec(tmp_path, space="s").prompt("Other.") == "Instruct: Other.\nQuery:", "the prompt's own form"
    given = infer_spec(tmp_path, space="s", pooling=Pooling.CLS, dim=32, max_length=40)
    assert (given.pooling, given.dim, given.max_length) == (Pooling.CLS, 32, 40)


@pytest.mark.parametrize(
    ("stated", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, Pooling.CLS),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.EOS),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
    ],
)
def test_pooling_modes_are_read(stated: dict[str, Any], pooling: Pooling, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    write_json(tmp_path / "1_Pooling" / "config.json", stated)
    assert infer_spec(tmp_path, space="s").pooling is pooling


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls_token"),
        ("modules.json", [{"type": "sentence_transformers.models.CNN"}], "CNN, which an encoder here cannot hold"),
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "0_Dense/config.json of the Dense layer"),
    ],
)
def test_unsupported_modules_and_values_are_refused(name: str, values: Any, complaint: str, tmp_path: Path) -> None:  # noqa: ANN401
    write_checkpoint(tmp_path, "bert")
    write_json(tmp_path / name, values)
    with pytest.raises(BadEncoder, match=complaint):
        infer_spec(tmp_path, space="s")


def test_pooling_is_never_guessed_for_a_bert_and_is_eos_for_a_decoder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "bert", "bert")
    with pytest.raises(BadEncoder, match="pooling"):
        infer_spec(tmp_path / "bert", space="s")
    write_checkpoint(tmp_path / "qwen3", "qwen3")
    assert infer_spec(tmp_path / "qwen3", space="s").pooling is Pooling.EOS


def test_the_token_limit_is_at_most_the_number_of_positions(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "xlm-roberta")
    assert infer_spec(tmp_path, space="s", pooling=Pooling.CLS).max_length == MAX_LENGTH
    longer = infer_spec(tmp_path, space="s", pooling=Pooling.CLS, max_length=MAX_LENGTH + 1)
    with pytest.raises(BadEncoder, match=f"more than the backbone's {MAX_LENGTH} positions"):
        TorchEncoder.load(tmp_path, longer)


def test_eos_pooling_gets_a_tokenizer_that_ends_with_eos(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", bare=True)
    tokenizer = Tokenizer.from_json(read_tokenizer(tmp_path, Pooling.EOS, read_config(tmp_path)), 8)
    assert tokenizer("").ids == [SEP]
    assert tokenizer("感冒").ids[-1] == SEP
    long = tokenizer("感冒" * 20)
    assert (len(long), long.ids[-1], long.truncated) == (8, SEP, True)


def test_eos_is_added_to_a_tokenizer_that_adds_only_bos(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3", bare=True)
    begun = tiny_tokenizer(bare=True)
    begun.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", CLS)])
    begun.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_json(read_tokenizer(tmp_path, Pooling.EOS, read_config(tmp_path)), 8)
    ids = tokenizer("感冒").ids
    assert (len(ids), ids[0], ids[-1]) == (4, CLS, SEP)
    long = tokenizer("感冒" * 20)
    assert (len(long), long.ids[0], long.ids[-1], long.truncated) == (8, CLS, SEP, True)


def test_a_tokenizer_with_special_tokens_is_not_changed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    content = read_tokenizer(tmp_path, Pooling.EOS, read_config(tmp_path))
    assert Tokenizer.from_json(content, 8)("").ids == [CLS, SEP]
    assert json.loads(content) == json.loads(tiny_tokenizer().to_str())


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """transformers would make a tokenizer of special tokens only, and every text would be unknown words."""
    write_checkpoint(tmp_path, "bert")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(BadEncoder, match=r"no vocabulary \(tokenizer\.json, vocab\.txt"):
        read_tokenizer(tmp_path, Pooling.CLS, read_config(tmp_path))


def test_a_missing_tokenizer_or_one_of_another_backbone_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    config = read_config(tmp_path)
    config.vocab_size -= 1
    with pytest.raises(BadEncoder, match="give it the tokenizer that it was trained with"):
        read_tokenizer(tmp_path, Pooling.CLS, config)
    (tmp_path / "tokenizer.json").write_text('{"no": "tokenizer"}')
    with pytest.raises(BadEncoder, match="no tokenizer that transformers can read"):
        read_tokenizer(tmp_path, Pooling.CLS, config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is missing or not an object"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "does not describe a bert: .*hidden_size"),
        ('{"model_type": "t5"}', "a t5 cannot be an encoder here"),
    ],
)
def test_a_configuration_that_is_not_an_encoder_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BadEncoder, match=f"(?s){message}"):
        read_config(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "nonsense"), ("num_attention_heads", 0)])
def test_a_configuration_that_no_model_can_be_made_of_is_refused(tmp_path: Path, key: str, value: object) -> None:
    write_checkpoint(tmp_path, "bert")
    stated = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", stated | {key: value})
    with pytest.raises(BadEncoder, match=r"config\.json does not describe a bert"):
        TorchEncoder.load(tmp_path, tiny_spec("bert"))
    with pytest.raises(BadEncoder, match=r"encoders\.both: config\.json does not describe a bert"):
        bare_model(read_config(tmp_path), "encoders.both")


def test_a_length_that_is_no_number_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": "many"})
    with pytest.raises(BadEncoder, match=r"tokenizer_config\.json: model_max_length is 'many', not a number"):
        infer_spec(tmp_path, space="s", pooling=Pooling.CLS)


@pytest.mark.parametrize("content", [b"", b"{}", bytes(8) + b"{}"])
def test_a_damaged_projection_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PROJECTION_FILE).write_bytes(content)
    with pytest.raises(BadEncoder, match=r"projection\.safetensors: damaged or not a projection"):
        Projection.load(tmp_path / PROJECTION_FILE, torch.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dim": 999}, "dim 999 is larger"),
        ({"dim": -1}, "dim: Input should be greater"),
        ({"max_length": 1}, "max_length"),
    ],
)
def test_impossible_options_are_named(tmp_path: Path, given: dict[str, int], message: str) -> None:
    write_checkpoint(tmp_path, "bert")
    with pytest.raises(BadEncoder, match=message):
        infer_spec(tmp_path, space="s", pooling=Pooling.CLS, **given)


def test_tokenizer_config_overrides_tokenizer_json(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["normalizer"] = None
    values["model"] = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 100, "vocab": values["model"]["vocab"] | {"##e": 900}}  # fmt: skip
    write_json(tmp_path / "tokenizer.json", values)
    config = read_config(tmp_path)
    config.vocab_size = 901
    cased = Tokenizer.from_json(read_tokenizer(tmp_path, Pooling.CLS, config), 8)
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    lowered = Tokenizer.from_json(read_tokenizer(tmp_path, Pooling.CLS, config), 8)
    assert cased("H").ids != cased("h").ids
    assert lowered("H").ids == lowered("h").ids
