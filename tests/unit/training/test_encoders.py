"""Encoders in training: which weights are trained, and how an encoder is saved for later stages."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from models.encoder.packed.encoder import PackedEncoder
from models.encoder.spec import EncoderSpec, Side, sha256_of
from models.encoder.torch import TorchEncoder, weight_files, weights_digest
from models.errors import BadEncoder
from models.importing.checkpoint import import_encoder
from models.importing.options import ImportOptions
from models.training.adapters import blend, trained_weights
from models.training.encoders import EncoderStore, set_dropout
from models.training.int8 import Int8Linear
from models.training.recipe import Encoder, Recipe
from models.training.shapes import check
from tests.support.toy_training import DOCUMENTS, ONE, toy_encoder, write_gguf, write_start

Make = Callable[..., Recipe]


def open_store(recipe: Recipe, folder: Path, **changes: object) -> EncoderStore:
    """Opens a store whose document encoder is configured with these changes."""
    config = Encoder.model_validate(recipe.encoders["document"].model_dump() | changes)
    return EncoderStore(recipe.model_copy(update={"encoders": recipe.encoders | {"document": config}}), folder, ONE)


def step(encoder: TorchEncoder) -> None:
    """Changes every trained weight."""
    with torch.no_grad():
        for value in trained_weights(encoder).values():
            value.add_(torch.randn_like(value) * 0.05)


def encoded(encoder: TorchEncoder) -> torch.Tensor:
    return torch.from_numpy(encoder.eval().encode(DOCUMENTS, Side.DOCUMENT))


@pytest.mark.parametrize(("supported", "held"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_processor_without_bf16_computes_in_float32_with_rounded_weights(
    tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch, supported: bool, held: torch.dtype
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    own = open_store(toy_recipe(), tmp_path, dtype="bf16")
    found = own.open("document", trained=False).state_dict()
    for name, weight in own._load("document", torch.float32).state_dict().items():
        assert found[name].dtype == held
        torch.testing.assert_close(found[name], weight.bfloat16(), rtol=0, atol=0, check_dtype=False)
    own.copy("document", tmp_path / "copied")
    assert load_file(tmp_path / "copied" / "model.safetensors")["norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("bits", [None, 8])
def test_adapters_are_merged_into_their_base_weights(tmp_path: Path, toy_recipe: Make, bits: int | None) -> None:
    own = open_store(toy_recipe(), tmp_path, lora={"rank": 4, "alpha": 8}, bits=bits)
    encoder = own.open("document", trained=True)
    names = list(trained_weights(encoder))
    assert names
    assert all("lora_" in name for name in names)
    step(encoder)
    expected = encoded(encoder)
    own.keep("document", encoder, tmp_path / "kept")
    merged = TorchEncoder.load(tmp_path / "kept")
    tolerance = 0.05 if bits else 1e-4
    torch.testing.assert_close(encoded(merged), expected, rtol=0, atol=tolerance)
    assert (encoded(merged) - encoded(own._load("document", torch.float32))).abs().max() < 1e-6
    assert own.folder("document") == tmp_path / "kept"


def test_saved_adapters_turn_the_start_into_the_trained_encoder(tmp_path: Path, toy_recipe: Make) -> None:
    own = open_store(toy_recipe(), tmp_path, lora={"rank": 4, "alpha": 8})
    start = own._load("document", torch.float32)
    encoder = own.open("document", trained=True)
    step(encoder)
    own.write("document", encoder, tmp_path / "kept")
    assert '"base_model_name_or_path": null' in (tmp_path / "kept-adapter/adapter_config.json").read_text()
    base = json.loads((tmp_path / "kept-adapter/base.json").read_text())
    name = "/".join(own.folder("document").parts[-2:])
    assert base == {"name": name, "sha256": weights_digest(start.backbone), "layers": 2}
    start.save(tmp_path / "start")
    (tmp_path / "kept-adapter").rename(tmp_path / "start/adapter")
    spec = EncoderSpec.load(tmp_path / "start")
    sums = {name: sha256_of(tmp_path / "start" / name) for name in weight_files(tmp_path / "start")}
    spec.model_copy(update={"checksums": spec.checksums | sums}).save(tmp_path / "start")
    expected = encoded(TorchEncoder.load(tmp_path / "kept"))
    torch.testing.assert_close(encoded(TorchEncoder.load(tmp_path / "start")), expected, rtol=0, atol=1e-5)


def test_an_adapter_of_the_first_layers_is_imported(tmp_path: Path, toy_recipe: Make) -> None:
    own = open_store(toy_recipe(), tmp_path, lora={"rank": 4, "alpha": 8}, layers=1)
    encoder = own.open("document", trained=True)
    step(encoder)
    own.write("document", encoder, tmp_path / "kept")
    (own.folder("document") / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[SEP]"})
    )
    options = ImportOptions(adapter=tmp_path / "kept-adapter")
    (made,) = import_encoder(str(own.folder("document")), tmp_path / "out", options)  # type: ignore[misc]
    kept, found = TorchEncoder.load(tmp_path / "kept"), TorchEncoder.load(tmp_path / "out")
    torch.testing.assert_close(encoded(found), encoded(kept), rtol=0, atol=1e-5)
    assert made.parameters == sum(weight.numel() for weight in kept.parameters())


@pytest.mark.parametrize(("architecture", "settings"), [
    ("bert", {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}),
    ("qwen3", {"attention_dropout": 0.5}),
])  # fmt: skip
def test_dropout_is_set_by_the_recipe(architecture: str, settings: dict[str, float]) -> None:
    encoder = toy_encoder(architecture, **settings).train()

    def reading() -> torch.Tensor:
        return encoder.pooled(torch.tensor([[2, 5, 6, 7, 8, 3]]), torch.ones(1, 6, dtype=torch.long))

    assert not torch.equal(reading(), reading())
    set_dropout(encoder.backbone, 0.0)
    assert torch.equal(reading(), reading())


def test_targets_choose_the_adapted_layers(tmp_path: Path, toy_recipe: Make) -> None:
    own = open_store(toy_recipe(), tmp_path, lora={"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]})
    names = trained_weights(own.open("document", trained=True))
    assert {name.split(".")[-4] for name in names} == {"q_proj", "v_proj"}


def test_an_8_bit_layer_is_close_and_passes_gradients_back() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8)
    small = Int8Linear(linear)
    x = torch.randn(5, 16, requires_grad=True)
    torch.testing.assert_close(small(x), linear(x), rtol=0, atol=0.05)
    (gradient,) = torch.autograd.grad(small(x).square().sum(), x)
    (expected,) = torch.autograd.grad(linear(x).square().sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=0.05, atol=0.1)
    assert small.weight.dtype is torch.int8


def test_a_frozen_encoder_requires_no_gradient(tmp_path: Path, toy_recipe: Make) -> None:
    assert not trained_weights(open_store(toy_recipe(), tmp_path).open("document", trained=False))


def test_a_copy_with_fewer_layers_starts_from_the_current_weights(tmp_path: Path, toy_recipe: Make) -> None:
    recipe = toy_recipe()
    student = Encoder(copy_of="document", layers=1, max_length=40)
    own = EncoderStore(recipe.model_copy(update={"encoders": recipe.encoders | {"student": student}}), tmp_path, ONE)
    encoder = own.open("document", trained=True)
    step(encoder)
    own.keep("document", encoder, tmp_path / "kept")
    copy = own.open("student", trained=True)
    assert copy.backbone.config.num_hidden_layers == len(copy.backbone.layers) == 1
    own.keep("student", copy, tmp_path / "student")
    again = TorchEncoder.load(tmp_path / "student")
    torch.testing.assert_close(
        again.state_dict()["backbone.layers.0.mlp.up_proj.weight"],
        encoder.state_dict()["backbone.layers.0.mlp.up_proj.weight"],
    )
    torch.testing.assert_close(encoded(again), encoded(copy))


@pytest.mark.parametrize("hidden", [0, 50])
def test_a_projection_is_trained_saved_and_loaded(tmp_path: Path, toy_recipe: Make, hidden: int) -> None:
    own = open_store(toy_recipe(), tmp_path, projection=96, hidden=hidden)
    encoder = own.open("document", trained=True)
    assert "projection.weight" in trained_weights(encoder)
    assert ("projection.hidden.weight" in trained_weights(encoder)) == (hidden > 0)
    assert encoder.spec.native_dim == 96
    own.keep("document", encoder, tmp_path / "kept")
    torch.testing.assert_close(encoded(TorchEncoder.load(tmp_path / "kept")), encoded(encoder))
    torch.testing.assert_close(encoded(own.open("document", trained=False)), encoded(encoder))
    packed = PackedEncoder.load(tmp_path / "kept", device="cpu").encode(DOCUMENTS, Side.DOCUMENT)
    torch.testing.assert_close(torch.from_numpy(packed), encoded(encoder), atol=1e-5, rtol=1e-5)


def test_hidden_units_are_those_of_the_projection_that_is_there(tmp_path: Path, toy_recipe: Make) -> None:
    own = open_store(toy_recipe(), tmp_path, projection=96, hidden=50)
    own.keep("document", own.open("document", trained=True), tmp_path / "kept")
    for hidden in (0, 50):
        again = open_store(toy_recipe(), tmp_path, projection=96, hidden=hidden, start=str(tmp_path / "kept"))
        assert "projection.hidden.weight" in trained_weights(again.open("document", trained=True))
    other = open_store(toy_recipe(), tmp_path, projection=96, hidden=20, start=str(tmp_path / "kept"))
    with pytest.raises(BadEncoder, match=r"has 50 hidden units, not 20; remove projection\.safetensors there"):
        other.open("document", trained=True)


def test_fingerprints_distinguish_encoders(tmp_path: Path, toy_recipe: Make) -> None:
    recipe = toy_recipe()
    prints = {
        open_store(recipe, tmp_path, **changes).fingerprint("document")
        for changes in ({}, {"document_instruction": "文："}, {"max_length": 30}, {"layers": 1})
    }
    assert len(prints) == 4
    write_start(tmp_path / "document", "qwen3", seed=4)
    assert open_store(recipe, tmp_path).fingerprint("document") not in prints


def test_weights_are_hashed_once(tmp_path: Path, toy_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    own = open_store(toy_recipe(), tmp_path)
    first = own.fingerprint("document")
    with monkeypatch.context() as patch:
        patch.delattr("models.training.encoders.sha256_of")
        assert own.fingerprint("document") == first
    own.keep("document", own.open("document", trained=False), tmp_path / "kept")
    assert own.fingerprint("document") != first


def test_a_gguf_file_can_be_a_start(tmp_path: Path, toy_recipe: Make) -> None:
    write_gguf(tmp_path / "model.gguf")
    own = open_store(toy_recipe(), tmp_path / "run", start=str(tmp_path / "model.gguf"))
    assert own.open("document", trained=True).spec.architecture == "qwen2"


@pytest.mark.parametrize("architecture", ["new", "xlm-roberta", "modernbert"])
def test_query_encoders_of_every_family_open_and_train(tmp_path: Path, toy_recipe: Make, architecture: str) -> None:
    write_start(tmp_path / architecture, architecture)
    own = open_store(toy_recipe(), tmp_path, start=str(tmp_path / architecture), pooling="cls")
    encoder = own.open("document", trained=True)
    ids, mask = torch.tensor([[2, 7, 8, 3]]), torch.ones(1, 4, dtype=torch.long)
    encoder(ids, mask).sum().backward()
    assert all(value.grad is not None for name, value in encoder.named_parameters() if "layers" in name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 9}, r"encoders\.document\.layers: .* has 2, not 9"),
        ({"max_length": 4000}, "max_length 4000 is more than"),
        ({"lora": {"rank": 2, "alpha": 4, "targets": ["nothing"]}}, r"lora\.targets: .*it has down_proj, .*v_proj"),
    ],
)
def test_a_missing_part_of_a_backbone_is_named_in_the_error(
    tmp_path: Path, toy_recipe: Make, changes: dict[str, object], message: str
) -> None:
    recipe = toy_recipe(document="document")
    config = Encoder.model_validate(recipe.encoders["document"].model_dump() | changes)
    with pytest.raises(BadEncoder, match=message):
        check(recipe.model_copy(update={"encoders": recipe.encoders | {"document": config}}))


def test_evaluation_and_training_use_the_same_instruction(tmp_path: Path, toy_recipe: Make) -> None:
    """The encoder reads a query in training as later under `care eval --instructions`."""
    from models.evaluation.benchmarks import read

    template = "Instruct: {instruction}\nQuery: "
    changes = {"instruction": "cmedteb/cmedteb-retrieval", "query_template": template}
    own = open_store(toy_recipe(), tmp_path, **changes)
    own.copy("document", tmp_path / "kept")
    spec = TorchEncoder.load(tmp_path / "kept").spec
    asked = next(item for item in read("cmedteb").sets if item.name == "cmedteb-retrieval").query_instruction
    assert asked is not None
    assert spec.query_instruction == spec.prompt(asked) == f"Instruct: {asked}\nQuery: "
    assert spec.prompt("") == ""


def test_a_recipe_can_remove_the_prompt_of_its_start(tmp_path: Path, toy_recipe: Make) -> None:
    recipe = toy_recipe()
    prompts = {"prompts": {"query": "Instruct: Find.\nQuery:", "document": ""}}
    (tmp_path / "document" / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert open_store(recipe, tmp_path).spec("document").query_instruction == "Instruct: Find.\nQuery:"
    cardio = Recipe.load(Path("models/training/recipes/cardioembed.toml")).encoders["both"]
    bare = {"query_instruction": cardio.query_instruction, "document_instruction": cardio.document_instruction}
    spec = open_store(recipe, tmp_path, **bare).spec("document")
    assert (spec.query_instruction, spec.document_instruction) == ("", "")


def test_the_recipe_overrides_the_settings_of_its_start(tmp_path: Path, toy_recipe: Make) -> None:
    own = open_store(toy_recipe(), tmp_path, query_instruction="问：", document_instruction="文：")
    own.copy("document", tmp_path / "kept")
    kept = {"start": str(tmp_path / "kept"), "pooling": None}
    spec = open_store(toy_recipe(), tmp_path, **kept).spec("document")
    assert (spec.query_instruction, spec.document_instruction, spec.pooling) == ("问：", "文：", "eos")
    spec = open_store(toy_recipe(), tmp_path, **kept | {"query_instruction": "", "pooling": "mean"}).spec("document")
    assert (spec.query_instruction, spec.document_instruction, spec.pooling) == ("", "文：", "mean")


def test_more_dimensions_than_the_backbone_has_are_refused(tmp_path: Path, toy_recipe: Make) -> None:
    own = EncoderStore(toy_recipe(extra={"dim": 100}), tmp_path, ONE)
    with pytest.raises(BadEncoder, match=r"encoders\.document: .*dim 100 is larger"):
        own.open("document", trained=False)


def test_a_blend_is_between_start_and_result() -> None:
    module, start = nn.Linear(3, 3), nn.Linear(3, 3)
    expected = 0.25 * module.weight.detach() + 0.75 * start.weight.detach()
    blend(module, trained_weights(start), 0.25)
    torch.testing.assert_close(module.weight.detach(), expected)


@pytest.mark.parametrize("name", ["2_Dense/model.safetensors", "adapter/adapter_model.safetensors", "vocab.txt"])
def test_every_file_that_decides_counts_for_the_fingerprint(tmp_path: Path, toy_recipe: Make, name: str) -> None:
    recipe = toy_recipe()

    def fingerprint() -> str:
        return EncoderStore(recipe, tmp_path / "run", ONE).fingerprint("document")

    before = fingerprint()
    (tmp_path / "document" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "document" / name).write_bytes(b"other")
    assert fingerprint() != before
