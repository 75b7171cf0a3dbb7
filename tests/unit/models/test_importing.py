"""Imports of published checkpoints: encoder folders with the reference library's vectors, or a refusal."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Router, Transformer

from cli import main
from models.encoder.folder import SENTENCE_FILE
from models.encoder.packed import joined
from models.encoder.packed.encoder import PackedEncoder
from models.encoder.spec import JOIN_FILE, POOLINGS, Beside, EncoderSpec, Side, sha256_of
from models.encoder.spec import Pooling as OurPooling
from models.encoder.staging import LOCK
from models.encoder.torch import Projection, TorchEncoder, weights_digest
from models.errors import BadEncoder, ParityError, SpaceMismatch
from models.export.parity import CHECK_TEXTS
from models.importing import checkpoint
from models.importing.checkpoint import import_encoder
from models.importing.options import ImportOptions
from models.importing.pairs import compare
from models.importing.router import write_router
from models.training.adapters import add_adapters, save_adapter
from models.training.recipe import Lora
from tests.support.tiny_models import WIDTH, tiny_encoder, write_checkpoint
from tests.support.toy_training import write_gguf, write_start

TEXTS = list(CHECK_TEXTS)


def plain(folder: Path, architecture: str = "bert") -> Path:
    write_checkpoint(folder, architecture)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "eos_token": "[SEP]"})
    )
    return folder


def sentence_folder(folder: Path, *layers: Dense, prompts: dict[str, str] | None = None) -> SentenceTransformer:
    transformer = Transformer(str(plain(folder / "plain")), max_seq_length=40)
    modules = [transformer, Pooling(WIDTH, "mean"), *layers, Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    model.save(str(folder / "model"), create_model_card=False)
    return model


def dense(width: int, dim: int, activation: torch.nn.Module, *, bias: bool = True) -> Dense:
    torch.manual_seed(width + dim)
    return Dense(width, dim, bias=bias, activation_function=activation)


@pytest.mark.parametrize("architecture", ["bert", "xlm-roberta", "modernbert", "gte", "qwen3"])
def test_a_transformers_folder_is_imported_and_compared_with_transformers(architecture: str, tmp_path: Path) -> None:
    source = plain(tmp_path / "source", architecture)
    options = ImportOptions(pooling=None if architecture == "qwen3" else OurPooling.CLS)
    (made,) = import_encoder(str(source), tmp_path / "out", options)
    assert (made.reference, made.spec.space) == ("transformers", "source")
    assert made.worst > 0.9999
    assert EncoderSpec.load(tmp_path / "out") == made.spec


def test_prompts_pooling_and_dense_layers_come_from_a_sentence_transformers_folder(tmp_path: Path) -> None:
    layers = dense(WIDTH, 96, torch.nn.Identity(), bias=False), dense(96, 48, torch.nn.Identity())
    model = sentence_folder(tmp_path, *layers, prompts={"query": "问：", "document": "文："})
    (made,) = import_encoder(str(tmp_path / "model"), tmp_path / "out", ImportOptions(dim=32))
    assert (made.reference, made.spec.native_dim, made.spec.dim) == ("sentence-transformers", 48, 32)
    assert (made.spec.query_instruction, made.spec.document_instruction) == ("问：", "文：")
    assert made.spec.pooling is OurPooling.MEAN
    expected = model.encode_query(TEXTS, truncate_dim=32, normalize_embeddings=True)
    for encoder in (TorchEncoder.load(tmp_path / "out"), PackedEncoder.load(tmp_path / "out", device="cpu")):
        np.testing.assert_allclose(encoder.encode(TEXTS, Side.QUERY), expected, atol=2e-5)


def test_a_dense_layer_may_end_in_tanh_only_if_it_is_the_last(tmp_path: Path) -> None:
    sentence_folder(tmp_path, dense(WIDTH, 48, torch.nn.Tanh()))
    (made,) = import_encoder(str(tmp_path / "model"), tmp_path / "out", ImportOptions())
    assert made.worst > 0.9999
    sentence_folder(tmp_path / "two", dense(WIDTH, 48, torch.nn.Tanh()), dense(48, 48, torch.nn.Identity()))
    with pytest.raises(BadEncoder, match="dense layers with Tanh, Identity are not supported, only linear ones, with"):
        import_encoder(str(tmp_path / "two/model"), tmp_path / "other", ImportOptions())
    sentence_folder(tmp_path / "gelu", dense(WIDTH, 48, torch.nn.GELU()))
    with pytest.raises(BadEncoder, match="a dense layer with GELU is not supported"):
        import_encoder(str(tmp_path / "gelu/model"), tmp_path / "other", ImportOptions())
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("last", [torch.nn.Identity(), torch.nn.Tanh()], ids=["identity", "tanh"])
def test_dense_layers_with_relu_between_are_imported(last: torch.nn.Module, tmp_path: Path) -> None:
    first = dense(WIDTH, 50, torch.nn.Identity()), dense(50, 90, torch.nn.ReLU(), bias=False)
    model = sentence_folder(tmp_path, *first, dense(90, 80, last))
    (made,) = import_encoder(str(tmp_path / "model"), tmp_path / "out", ImportOptions())
    assert made.spec.native_dim == 80
    found = TorchEncoder.load(tmp_path / "out").encode(TEXTS, Side.QUERY)
    np.testing.assert_allclose(found, model.encode_query(TEXTS, normalize_embeddings=True), atol=2e-5)


def test_relu_at_the_end_or_twice_is_refused(tmp_path: Path) -> None:
    relu = [dense(WIDTH, WIDTH, torch.nn.ReLU()) for _ in range(2)]
    for name, layers in (("end", relu[:1]), ("twice", [*relu, dense(WIDTH, 48, torch.nn.Identity())])):
        sentence_folder(tmp_path / name, *layers)
        with pytest.raises(BadEncoder, match="only linear ones, with ReLU behind one"):
            import_encoder(str(tmp_path / name / "model"), tmp_path / "other", ImportOptions())


@pytest.mark.parametrize(
    ("place", "facts", "tensors", "reason"),
    [
        (
            0,
            {"in_features": 50},
            {},
            r"take vectors of \[50, 90\] dimensions and get those of \[64, 90\]",
        ),
        (1, {"in_features": 80}, {}, r"take vectors of \[64, 80\] dimensions and get those of \[64, 90\]"),
        (0, {"in_features": "64"}, {}, "lacks in_features or out_features"),
        (1, {"out_features": 70}, {}, r"not the weights of config\.json beside it"),
        (1, {}, {"linear.bias": np.zeros(3, np.float32)}, r"not the weights of config\.json beside it"),
        (0, {"bias": False}, {}, r"not the weights of config\.json beside it"),
        (0, {}, None, r"model\.safetensors is damaged"),
    ],
)
def test_dense_layers_that_do_not_fit_are_refused(
    place: int, facts: dict[str, object], tensors: dict[str, np.ndarray] | None, reason: str, tmp_path: Path
) -> None:
    sentence_folder(tmp_path, dense(WIDTH, 90, torch.nn.ReLU()), dense(90, 48, torch.nn.Identity()))
    layer = sorted((tmp_path / "model").glob("*Dense"))[place]
    config, weights = layer / "config.json", layer / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | facts))
    if tensors is None:
        weights.write_bytes(b"{}")
    else:
        save_file(load_file(weights) | tensors, weights)
    with pytest.raises(BadEncoder, match=reason):
        import_encoder(str(tmp_path / "model"), tmp_path / "out", ImportOptions())
    assert not (tmp_path / "out").exists()


def test_a_router_becomes_two_encoders_of_one_space(tmp_path: Path) -> None:
    towers = []
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(seed)
        towers.append([Transformer(str(plain(tmp_path / name)), max_seq_length=40), Pooling(WIDTH, "mean")])
    router = Router.for_query_document(query_modules=towers[0], document_modules=towers[1])
    model = SentenceTransformer(modules=[router, Normalize()], device="cpu", prompts={"query": "问："})
    model.save(str(tmp_path / "pair"), create_model_card=False)
    query, document = import_encoder(str(tmp_path / "pair"), tmp_path / "out", ImportOptions(space="both"))
    assert (query.spec.sides, document.spec.sides) == ((Side.QUERY,), (Side.DOCUMENT,))
    assert query.spec.space == document.spec.space == "both"
    for side, expected in ((Side.QUERY, model.encode_query(TEXTS)), (Side.DOCUMENT, model.encode_document(TEXTS))):
        found = TorchEncoder.load(tmp_path / "out" / side).encode(TEXTS, side)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    swapped = [tmp_path / "out/document", tmp_path / "out/query"]
    for compared in (lambda: compare(*swapped), lambda: write_router(*swapped, tmp_path / "both")):
        with pytest.raises(SpaceMismatch, match="reads documents only"):
            compared()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("hidden", [0, 30])
def test_a_pair_is_written_as_a_router_and_read_back(pooling: OurPooling, hidden: int, tmp_path: Path) -> None:
    query = tiny_encoder("bert", pooling, dim=32)
    if hidden:
        query.projection = Projection(WIDTH, WIDTH, hidden=hidden, bias=True)
    document = tiny_encoder("qwen3", OurPooling.EOS, dim=32, seed=1)
    projected = Projection(WIDTH, WIDTH, bias=True, tanh=True)
    whole = TorchEncoder(document.backbone, document.spec, document.tokenizer_json, projected).eval()
    query.spec = query.spec.model_copy(update={"query_instruction": "问："})
    query.save(tmp_path / "q")
    whole.save(tmp_path / "d")
    assert main(["encoder", "router", str(tmp_path / "q"), str(tmp_path / "d"), str(tmp_path / "both")]) == 0
    model = SentenceTransformer(str(tmp_path / "both"), device="cpu")
    np.testing.assert_allclose(model.encode_query(TEXTS), query.encode(TEXTS, Side.QUERY), atol=2e-5)
    np.testing.assert_allclose(model.encode_document(TEXTS), whole.encode(TEXTS, Side.DOCUMENT), atol=2e-5)
    one, two = import_encoder(str(tmp_path / "both"), tmp_path / "again", ImportOptions(space="s"))
    assert min(one.worst, two.worst) > 0.9999


def test_encoders_of_two_spaces_are_refused_as_a_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tiny_encoder("bert"), tiny_encoder("bert", seed=1)
    two.spec = two.spec.model_copy(update={"space": "other"})
    one.save(tmp_path / "q")
    two.save(tmp_path / "d")
    assert main(["encoder", "router", str(tmp_path / "q"), str(tmp_path / "d"), str(tmp_path / "both")]) == 1
    assert "is of space tiny (64 dimensions)" in capsys.readouterr().err


def test_an_adapter_is_merged_into_its_checkpoint(tmp_path: Path) -> None:
    sentence_folder(tmp_path, dense(WIDTH, WIDTH, torch.nn.Identity()), prompts={"query": "问：", "document": "文："})
    source = str(tmp_path / "model")
    import_encoder(source, tmp_path / "base", ImportOptions())
    trained = TorchEncoder.load(tmp_path / "base")
    base = {"name": "base", "sha256": weights_digest(trained.backbone)}
    add_adapters(trained, Lora(rank=2, alpha=4))
    assert trained.projection is not None
    for weight in (*(w for n, w in trained.named_parameters() if "lora_B" in n), trained.projection.weight):
        torch.nn.init.normal_(weight, std=0.1)
    trained.spec = trained.spec.model_copy(update={"space": "trained", "dim": 16})
    save_adapter(trained, tmp_path / "adapter", base)
    (made,) = import_encoder(source, tmp_path / "out", ImportOptions(adapter=tmp_path / "adapter", max_length=24))
    assert (made.spec.space, made.spec.dim, made.spec.max_length, made.spec.query_instruction) == (
        "trained",
        16,
        24,
        "问：",
    )
    short = [text for text in TEXTS if len(text) < 20]
    for side in Side:
        expected = trained.eval().encode(short, side)
        found = TorchEncoder.load(tmp_path / "out").encode(short, side)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    (half,) = import_encoder(source, tmp_path / "half", ImportOptions(adapter=tmp_path / "adapter", dtype="bfloat16"))
    whole = TorchEncoder.load(tmp_path / "out")  # what is merged is rounded once, and the matrix is not
    rounded = TorchEncoder.load(tmp_path / "half")
    assert half.weight_bytes < 0.6 * made.weight_bytes
    assert len({path.stat().st_mode for path in (tmp_path / "half").iterdir()}) == 1, "whoever reads one reads all"
    for found, expected in zip(rounded.backbone.parameters(), whole.backbone.parameters(), strict=True):
        assert torch.equal(found, expected.bfloat16().float())
    assert rounded.projection is not None
    assert torch.equal(rounded.projection.weight, trained.projection.weight)
    plain(tmp_path / "other", "xlm-roberta")
    options = ImportOptions(pooling=OurPooling.CLS, adapter=tmp_path / "adapter")
    with pytest.raises(BadEncoder, match="was trained from a bert, not from a xlm-roberta"):
        import_encoder(str(tmp_path / "other"), tmp_path / "no", options)
    assert not (tmp_path / "no").exists()


def test_an_adapter_of_other_weights_is_refused(tmp_path: Path) -> None:
    source, adapter = str(plain(tmp_path / "model")), tmp_path / "adapter"
    options = ImportOptions(pooling=OurPooling.CLS, adapter=adapter)
    import_encoder(source, tmp_path / "base", ImportOptions(pooling=OurPooling.CLS))
    trained = TorchEncoder.load(tmp_path / "base")
    torch.nn.init.normal_(next(trained.backbone.parameters()))  # as an earlier stage left it
    base = {"name": "first/document", "sha256": weights_digest(trained.backbone)}
    add_adapters(trained, Lora(rank=2, alpha=4))
    save_adapter(trained, adapter, base)
    with pytest.raises(BadEncoder, match="other weights than these: it needs those of first/document; if a stage"):
        import_encoder(source, tmp_path / "out", options)
    spec = EncoderSpec.load(adapter)
    (adapter / "base.json").unlink()  # as adapters were saved before
    spec.model_copy(update={"checksums": {}}).save(adapter)
    import_encoder(source, tmp_path / "out", options)


def test_a_damaged_adapter_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, adapter = str(plain(tmp_path / "model")), tmp_path / "adapter"
    options = ImportOptions(pooling=OurPooling.CLS, adapter=adapter)
    import_encoder(source, tmp_path / "base", ImportOptions(pooling=OurPooling.CLS))
    trained = TorchEncoder.load(tmp_path / "base")
    base = {"name": "base", "sha256": weights_digest(trained.backbone)}
    add_adapters(trained, Lora(rank=2, alpha=4))
    trained.projection = Projection(WIDTH, WIDTH)
    save_adapter(trained, adapter, base)
    assert main(["encoder", "show", str(adapter)]) == 0
    assert "care index build" not in capsys.readouterr().out, "an adapter alone reads nothing"
    spec = EncoderSpec.load(adapter)
    files = ["adapter_config.json", "adapter_model.safetensors", "base.json", "projection.safetensors"]
    assert sorted(spec.checksums) == files
    for name in spec.checksums:
        whole = (adapter / name).read_bytes()
        (adapter / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(BadEncoder, match=f"{name} is missing or damaged; copy the adapter's folder again"):
            import_encoder(source, tmp_path / "out", options)
        (adapter / name).write_bytes(whole)
    unlisted = {name: value for name, value in spec.checksums.items() if name != "projection.safetensors"}
    spec.model_copy(update={"checksums": unlisted}).save(adapter)  # somebody put a file there
    with pytest.raises(BadEncoder, match=r"projection\.safetensors is missing or damaged"):
        import_encoder(source, tmp_path / "out", options)
    spec.model_copy(update={"checksums": {}}).save(adapter)  # as adapters were saved before
    import_encoder(source, tmp_path / "out", options)


def test_the_bundled_adapter_is_whole() -> None:
    folder = Path("models/pretrained/care-pair-zh/document")
    found = {path.name: sha256_of(path) for path in folder.iterdir() if path.name != "encoder.json"}
    assert EncoderSpec.load(folder).checksums == found


def test_an_adapter_of_two_encoders_needs_the_right_second_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("model", 1), ("small", 2), ("other", 3)):
        plain(tmp_path / name)
        perturb(tmp_path / name / "model.safetensors", seed)
    cls = OurPooling.CLS
    for name in ("model", "small"):
        import_encoder(str(tmp_path / name), tmp_path / f"{name}-alone", ImportOptions(pooling=cls))
    trained, small = (TorchEncoder.load(tmp_path / f"{name}-alone") for name in ("model", "small"))
    base = {"name": "base", "sha256": weights_digest(trained.backbone)}
    add_adapters(trained, Lora(rank=2, alpha=4))
    matrix = np.linalg.qr(np.random.default_rng(0).normal(size=(2 * WIDTH, WIDTH)))[0].astype(np.float32)
    check = small.encode(CHECK_TEXTS[:8], Side.DOCUMENT)
    (tmp_path / "adapter").mkdir()
    save_file({joined.WEIGHT: matrix, joined.CHECK: check}, tmp_path / "adapter" / JOIN_FILE)
    save_adapter(trained, tmp_path / "adapter", base)
    beside = Beside(share=0.3, native_dim=WIDTH, dim=WIDTH, pooling=cls)
    own = EncoderSpec.load(tmp_path / "adapter").model_copy(update={"beside": beside})
    own.save(tmp_path / "adapter")

    def made(second: str | None, target: str, dim: int | None = None) -> EncoderSpec:
        source = None if second is None else str(tmp_path / second)
        options = ImportOptions(pooling=cls, adapter=tmp_path / "adapter", beside=source, dim=dim)
        (done,) = import_encoder(str(tmp_path / "model"), tmp_path / target, options)
        return done.spec

    assert made("small", "out").beside == beside
    found = joined.open_packed(tmp_path / "out", device="cpu").encode(TEXTS, Side.DOCUMENT)
    parts = [encoder.eval().encode(TEXTS, Side.DOCUMENT) for encoder in (trained, small)]
    np.testing.assert_allclose(found, joined.join(parts, 0.3, matrix), atol=1e-4)
    assert made("small", "narrow", dim=16).dim == 16
    narrow = joined.open_packed(tmp_path / "narrow", device="cpu").encode(TEXTS, Side.DOCUMENT)
    np.testing.assert_allclose(narrow, joined.join(parts, 0.3, matrix[:, :16]), atol=1e-4)
    assert main(["encoder", "show", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "joined with those of the encoder in beside/, which has a share of 0.3" in shown
    assert "care export" not in shown
    with pytest.raises(BadEncoder, match="or another --space for one alone"):
        made(None, "no")
    capsys.readouterr()
    alone = ["--pooling", "cls", "--adapter", str(tmp_path / "adapter"), "--space", "the first one alone"]
    assert main(["encoder", "import", str(tmp_path / "model"), str(tmp_path / "first"), *alone]) == 0
    assert "the first of two encoders alone" in capsys.readouterr().out
    first = joined.open_packed(tmp_path / "first", device="cpu")
    assert (first.spec.beside, first.spec.space) == (None, "the first one alone")
    np.testing.assert_allclose(first.encode(TEXTS, Side.DOCUMENT), parts[0], atol=1e-4)
    with pytest.raises(ParityError, match="not the encoder that the adapter was trained with"):
        made("other", "no")
    (tmp_path / "adapter" / JOIN_FILE).write_bytes(b"{}")
    for checksums in (own.checksums, {}):
        own.model_copy(update={"checksums": checksums}).save(tmp_path / "adapter")
        with pytest.raises(BadEncoder, match="is missing or damaged"):
            made("small", "no")
    assert not (tmp_path / "no").exists()
    with pytest.raises(BadEncoder, match="--beside names the second encoder of an --adapter"):
        import_encoder(
            str(tmp_path / "model"), tmp_path / "no", ImportOptions(pooling=cls, beside=str(tmp_path / "small"))
        )


def perturb(path: Path, seed: int) -> None:
    """Changes the weights of a checkpoint a little, so that two of one shape differ."""
    random = np.random.default_rng(seed)
    weights = {name: value + 0.02 * random.normal(size=value.shape) for name, value in load_file(path).items()}
    save_file({name: value.astype(np.float32) for name, value in weights.items()}, path, {"format": "pt"})


def test_a_gguf_file_is_imported(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    (made,) = import_encoder(str(tmp_path / "model.gguf"), tmp_path / "out", ImportOptions())
    assert (made.spec.architecture, made.spec.pooling, made.spec.space) == ("qwen2", OurPooling.EOS, "model")


def test_vectors_that_differ_from_the_reference_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(source: Path, spec: EncoderSpec, prompt: str) -> Any:  # noqa: ANN401
        return np.random.default_rng(0).normal(size=(len(TEXTS), spec.dim)).astype(np.float32)

    monkeypatch.setattr(checkpoint, "_plain_vectors", other)
    with pytest.raises(ParityError, match=r"vectors differ from transformers's .* check --pooling"):
        import_encoder(str(plain(tmp_path / "source")), tmp_path / "out", ImportOptions(pooling=OurPooling.CLS))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_failed_import_gives_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = plain(tmp_path / "source")
    assert main(["encoder", "import", str(source), str(tmp_path / "out")]) == 1
    assert "does not say how it is pooled" in capsys.readouterr().err
    assert main(["encoder", "import", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    assert "neither a folder, nor a .gguf file, nor a hub id" in capsys.readouterr().err
    assert main(["encoder", "import", str(source), str(source), "--pooling", "cls"]) == 1
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize("stated", [None, {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}])
def test_a_decoder_whose_special_tokens_are_not_stated_is_refused(stated: object, tmp_path: Path) -> None:
    # Without a file transformers takes Qwen2's tokenizer, whose end of text is added behind the model's tokens.
    settings = plain(tmp_path / "source", "qwen3") / "tokenizer_config.json"
    if stated is None:
        settings.unlink()
    else:
        settings.write_text(json.dumps(stated))
    with pytest.raises(BadEncoder, match=r"tokens that the model lacks, or no eos_token; fetch tokenizer_config\.json"):
        import_encoder(str(tmp_path / "source"), tmp_path / "out", ImportOptions())
    assert not (tmp_path / "out").exists()


def test_the_command_imports_shows_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        source = str(plain(tmp_path / name))
        assert main(["encoder", "import", source, str(tmp_path / f"out-{name}"), "--pooling", "cls"]) == 0
    assert "cosine to transformers 1.0000" in capsys.readouterr().out
    assert main(["encoder", "show", str(tmp_path / "out-one")]) == 0
    assert "bert, cls pooling, 64 dimensions, 48 tokens, space one" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["encoder", "pair", str(tmp_path / "out-one"), str(tmp_path / "out-two")])
    # The same weights under two names.
    assert "cosine 1.000 to themselves" in (shown := capsys.readouterr().out)
    assert "the vectors fit, the names of the spaces do not" in shown


def test_two_spaces_are_distinguished_by_their_vectors(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        source = plain(tmp_path / name)
        if seed == 2:
            encoder = TorchEncoder.load(tmp_path / "out-one")
            torch.manual_seed(seed)
            for parameter in encoder.backbone.parameters():
                torch.nn.init.normal_(parameter, 0.0, 0.15)
            encoder.backbone.save_pretrained(source)
        import_encoder(str(source), tmp_path / f"out-{name}", ImportOptions(pooling=OurPooling.CLS, space="same"))
    found = compare(tmp_path / "out-one", tmp_path / "out-two")
    assert not found.shared
    assert found.matched < 0.5
    assert "the names are equal, the vectors do not fit" in found.verdict
    assert compare(tmp_path / "out-one", tmp_path / "out-one").shared


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_folder_of_an_early_sentence_transformers_version_is_read(tmp_path: Path) -> None:
    """Its transformer is in a subfolder; documents have their prompt under the last of three names."""
    sentence_folder(tmp_path)
    model = tmp_path / "model"
    (model / "0_Transformer").mkdir()
    for path in [
        path for path in model.iterdir() if path.is_file() and path.name not in ("modules.json", SENTENCE_FILE)
    ]:
        path.rename(model / "0_Transformer" / path.name)
    modules = json.loads((model / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (model / "modules.json").write_text(json.dumps(modules))
    change(model / SENTENCE_FILE, prompts={"query": "问：", "corpus": "文："})
    (made,) = import_encoder(str(model), tmp_path / "out", ImportOptions())
    assert (made.reference, made.spec.space) == ("sentence-transformers", "model")
    assert (made.spec.query_instruction, made.spec.document_instruction) == ("问：", "文：")
    assert made.worst > 0.9999


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", '{"a": 1}', "not a list of modules"),
        ("modules.json", '[{"idx": 0}]', "not a list of modules"),
        (
            "modules.json",
            '[{"type": "x.Transformer", "path": "0"}, {"type": "x.Pooling", "path": "../../away"}]',
            "outside",
        ),
        (SENTENCE_FILE, "[]", "no JSON object"),
        (SENTENCE_FILE, '{"prompts": {"query": 5}}', "prompts must be texts"),
        ("1_Pooling/config.json", "[]", "no JSON object"),
    ],
)
def test_files_of_another_form_are_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    sentence_folder(tmp_path)
    (tmp_path / "model" / name).write_text(content)
    with pytest.raises(BadEncoder, match=message):
        import_encoder(str(tmp_path / "model"), tmp_path / "out", ImportOptions())


def test_a_router_without_the_two_routes_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "bert")
    (tmp_path / "model/modules.json").write_text('[{"type": "x.Router", "path": ""}]')
    for content in ('{"structure": {"query": ["a"]}, "types": {}}', "{}"):
        (tmp_path / "model/router_config.json").write_text(content)
        with pytest.raises(BadEncoder, match="the routes query and document"):
            import_encoder(str(tmp_path / "model"), tmp_path / "out", ImportOptions())


def test_the_import_reports_if_vector_lengths_count_in_the_similarity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence_folder(tmp_path)
    change(tmp_path / "model" / SENTENCE_FILE, similarity_fn_name="dot")
    assert main(["encoder", "import", str(tmp_path / "model"), str(tmp_path / "normed")]) == 0
    assert "compares vectors by dot" not in capsys.readouterr().out
    modules = json.loads((tmp_path / "model/modules.json").read_text())
    (tmp_path / "model/modules.json").write_text(json.dumps(modules[:2]))
    assert main(["encoder", "import", str(tmp_path / "model"), str(tmp_path / "out")]) == 0
    assert "compares vectors by dot, with their lengths" in capsys.readouterr().out


def test_the_import_prints_next_commands_that_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The Hugging Face cache gives the space; a path with spaces is quoted; torch does not index distilbert."""
    snapshot = plain(tmp_path / "models--me--my-bert/snapshots/0123")
    out = tmp_path / "my encoder"
    assert main(["encoder", "import", str(snapshot), str(out), "--pooling", "cls"]) == 0
    output = capsys.readouterr().out
    assert "space my-bert," in output
    assert f"care index build CORPUS --encoder '{out}'" in output
    assert f"care export '{out}' '{out}-served'" in output
    change(out / "encoder.json", architecture="distilbert")
    assert main(["encoder", "show", str(out)]) == 0
    output = capsys.readouterr().out
    assert "care index build" not in output
    assert "to index and serve queries, make graphs first" in output
    change(out / "encoder.json", architecture="bert", sides=["document"])
    assert main(["encoder", "show", str(out)]) == 0
    assert "make graphs first" not in (output := capsys.readouterr().out)
    assert "care index build" in output
    change(out / "encoder.json", sides=["query"])
    assert main(["encoder", "show", str(out)]) == 0
    assert "care index build" not in (output := capsys.readouterr().out)
    assert "to serve queries, make graphs first" in output


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    source = plain(tmp_path / "source")
    encoder = tiny_encoder("bert")
    next(encoder.backbone.parameters()).data.fill_(float("inf"))
    encoder.backbone.save_pretrained(source)
    with pytest.raises(BadEncoder, match="not finite"):
        import_encoder(str(source), tmp_path / "out", ImportOptions(pooling=OurPooling.CLS))


@pytest.mark.parametrize("architecture", ["bert", "qwen3"])
def test_weights_with_more_layers_than_the_configuration_are_refused(architecture: str, tmp_path: Path) -> None:
    folder = plain(tmp_path / "published", architecture)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": 1}
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "layer_types"}))
    with pytest.raises(BadEncoder, match=r"more layers than config\.json says \(.*layers?\.1\..*; fetch both"):
        import_encoder(str(folder), tmp_path / "own", ImportOptions(pooling=OurPooling.MEAN))
    assert not (tmp_path / "own").exists()


def test_vectors_of_zeros_are_refused(tmp_path: Path) -> None:
    source = plain(tmp_path / "source")
    encoder = tiny_encoder("bert")
    for parameter in encoder.backbone.parameters():
        parameter.data.zero_()
    encoder.backbone.save_pretrained(source)
    with pytest.raises(BadEncoder, match="vectors of zeros"):
        import_encoder(str(source), tmp_path / "out", ImportOptions(pooling=OurPooling.CLS))


def test_files_of_a_killed_import_are_removed_by_the_next_one(tmp_path: Path) -> None:
    """Folders of other programs, and of a running import, are kept."""
    killed, running, other = (tmp_path / f".out-{name}" for name in ("killed", "running", "other"))
    for folder in (killed, running, other):
        (folder / "staged").mkdir(parents=True)
    for folder in (killed, running):
        (folder / LOCK).touch()
    with (running / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        import_encoder(str(plain(tmp_path / "source")), tmp_path / "out", ImportOptions(pooling=OurPooling.CLS))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", running.name, other.name}


def test_a_tokenizer_of_another_kind_than_the_models_class_reads_is_named(tmp_path: Path) -> None:
    """XLM-R's class reads a unigram vocabulary; this one has words."""
    source = write_start(tmp_path / "model", "xlm-roberta")
    with pytest.raises(BadEncoder, match=r"cannot be read, .*; fetch tokenizer_config\.json"):
        import_encoder(str(source), tmp_path / "out", ImportOptions(pooling=OurPooling.MEAN))
