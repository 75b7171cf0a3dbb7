import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from peft import LoraConfig, get_peft_model

from models.encoder.folder import infer_spec
from models.encoder.onnx import OnnxEncoder
from models.encoder.packed.encoder import PackedEncoder
from models.encoder.spec import Pooling, Precision, Side
from models.encoder.torch import TorchEncoder
from models.errors import BadEncoder, CareError
from models.evaluation.encoders import Address, open_encoder
from tests.support.tiny_models import tiny_encoder, write_checkpoint

BUNDLED = Path("models/pretrained/care-small-zh")
TEXTS = ["高血压吃什么药", "感冒", "孩子发烧三十九度怎么办，要不要马上去医院"]


@pytest.mark.parametrize(
    ("text", "place", "options"),
    [
        ("folder", "folder", {}),
        ("folder,pooling=mean", "folder", {"pooling": "mean"}),
        ("a,b,max_length=64,pooling=cls", "a,b", {"max_length": "64", "pooling": "cls"}),
        ("a,unknown=1", "a,unknown=1", {}),
    ],
)
def test_options_follow_the_folder(text: str, place: str, options: dict[str, str]) -> None:
    assert Address.parse(text, ("pooling", "max_length")) == Address(place, options)


def test_an_option_without_a_value_is_refused() -> None:
    with pytest.raises(CareError, match="name=value"):
        Address.parse("folder,pooling", ("pooling",))


def test_an_onnx_folder_gives_each_text_the_vector_it_has_alone() -> None:
    opened = open_encoder(str(BUNDLED))
    encoder = OnnxEncoder.load(BUNDLED)
    alone = np.concatenate([encoder.encode([text], Side.DOCUMENT) for text in TEXTS])
    np.testing.assert_array_equal(opened.encode(TEXTS), alone)
    np.testing.assert_array_equal(opened.encode(TEXTS[::-1]), alone[::-1])
    assert opened.name == "care-small-zh (int8)"
    assert opened.fingerprint == encoder.fingerprint
    assert opened.spec == encoder.spec


def test_a_checkpoint_is_read_by_its_files_and_the_options(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, "bert")
    opened = open_encoder(f"{folder},pooling=mean,max_length=16")
    spec = infer_spec(folder, space="checkpoint", pooling=Pooling.MEAN, max_length=16)
    np.testing.assert_allclose(
        opened.encode(TEXTS), TorchEncoder.load(folder, spec).encode(TEXTS, Side.DOCUMENT), atol=1e-6
    )
    assert opened.name == "checkpoint"
    assert opened.spec == spec
    assert opened.parameters is not None
    with pytest.raises(BadEncoder, match=r"give pooling cls or mean .*--pooling cls"):
        open_encoder(str(folder))


def test_a_trained_folder_is_read_by_its_own_encoder_json(tmp_path: Path) -> None:
    encoder = tiny_encoder("bert", Pooling.MEAN)
    encoder.save(tmp_path / "trained")
    opened = open_encoder(str(tmp_path / "trained"))
    np.testing.assert_allclose(opened.encode(TEXTS), encoder.encode(TEXTS, Side.QUERY), atol=1e-6)
    assert opened.spec.pooling is Pooling.MEAN
    with pytest.raises(BadEncoder, match=r"encoder\.json says its pooling"):
        open_encoder(f"{tmp_path / 'trained'},pooling=cls")


def test_opening_an_encoder_adds_no_instruction(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, "bert")
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "感冒", "document": "药"}})
    )
    opened = open_encoder(f"{folder},pooling=cls")
    assert opened.spec.query_instruction == "感冒"
    (folder / "config_sentence_transformers.json").unlink()
    plain = open_encoder(f"{folder},pooling=cls")
    np.testing.assert_array_equal(opened.encode(TEXTS), plain.encode(TEXTS))


def test_a_precision_gives_the_vectors_of_the_indexer(tmp_path: Path) -> None:
    """The cost of fp8 must be measured on what the indexer computes."""
    encoder = tiny_encoder("qwen3")
    encoder.spec = encoder.spec.model_copy(update={"document_instruction": "文档："})
    encoder.save(tmp_path / "llm")
    opened = {
        precision: open_encoder(f"{tmp_path / 'llm'},precision={precision},device=cpu") for precision in Precision
    }
    for precision, each in opened.items():
        indexer = PackedEncoder.load(tmp_path / "llm", device="cpu", precision=precision)
        instructed = [each.spec.document_instruction + text for text in TEXTS]
        np.testing.assert_array_equal(each.encode(instructed), indexer.encode(TEXTS, Side.DOCUMENT))
        assert each.name == f"llm ({precision})"
    assert len({each.fingerprint for each in opened.values()}) == len(opened)
    with pytest.raises(BadEncoder, match="precision=fp4: choose from"):
        open_encoder(f"{tmp_path / 'llm'},precision=fp4")


def test_the_fingerprint_depends_on_everything_that_changes_vectors(tmp_path: Path) -> None:
    folder, other = tmp_path / "one", tmp_path / "other"
    write_checkpoint(folder, "bert")
    shutil.copytree(folder, other)
    fingerprint = open_encoder(f"{folder},pooling=cls").fingerprint
    assert open_encoder(f"{other},pooling=cls").fingerprint == fingerprint
    different = [
        f"{folder},pooling=mean",
        f"{folder},pooling=cls,max_length=16",
        f"{folder},pooling=cls,dtype=bfloat16",
    ]
    adapted = tmp_path / "adapted"
    shutil.copytree(folder, adapted)
    config = LoraConfig(target_modules=["query"])
    get_peft_model(tiny_encoder("bert").backbone, config).save_pretrained(adapted / "adapter")
    different.append(f"{adapted},pooling=cls")
    for name, content in (("tokenizer_config.json", "{}"), ("special_tokens_map.json", "{}"), ("spiece.model", "")):
        different.append(f"{tmp_path / name},pooling=cls")
        (shutil.copytree(folder, tmp_path / name) / name).write_text(content)
    tiny_encoder("bert", seed=1).backbone.save_pretrained(other)
    found = {open_encoder(text).fingerprint for text in (*different, f"{other},pooling=cls")}
    assert len(found) == 8
    assert fingerprint not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-folder", "no such encoder folder"),
        (f"{BUNDLED},variant=int4", "variant=int4: choose from fp32, fp16, int8"),
        (f"{BUNDLED},variant=fp32", r"model\.onnx is missing"),
        (f"{BUNDLED},pooling=mean", r"encoder\.json says its pooling"),
        ("docs", r"neither encoder\.json with an ONNX graph nor config\.json with torch weights"),
        ("docs,variant=int8", "no ONNX graph to choose from"),
        (f"{BUNDLED},device=gpu", "device=gpu: choose from cpu, cuda"),
        (f"{BUNDLED},precision=bf16,variant=int8", "leave dtype and variant out"),
    ],
)
def test_a_folder_that_cannot_be_opened_is_reported_in_one_line(text: str, message: str) -> None:
    with pytest.raises(BadEncoder, match=message):
        open_encoder(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("dtype=int3", "dtype=int3: choose from"),
        ("pooling=max", "pooling=max: choose from"),
        ("max_length=many,pooling=cls", "max_length=many is not a whole number"),
        ("max_length=1,pooling=cls", "max_length: Input should be greater than 2"),
    ],
)
def test_an_invalid_option_value_is_named(tmp_path: Path, options: str, message: str) -> None:
    write_checkpoint(tmp_path, "bert")
    with pytest.raises(BadEncoder, match=message):
        open_encoder(f"{tmp_path},{options}")
