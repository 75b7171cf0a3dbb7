"""Two encoders whose vectors are joined: what a run reads, writes and refuses, and what the folder gives again."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import load_file

from models.encoder.packed.hubs import Hubs
from models.encoder.packed.joined import JoinedEncoder, basis, join, open_packed, side_by_side
from models.encoder.spec import BESIDE, JOIN_FILE, SPEC_FILE, Precision, Side
from models.encoder.torch import PROJECTION_FILE, Projection, TorchEncoder
from models.errors import BadEncoder, CareError
from models.evaluation.encoders import open_encoder
from models.evaluation.lineup import Lineup, LineupOptions
from models.evaluation.readers import EncoderReader
from models.evaluation.sets import Kind, RetrievalSet, plain_task
from models.training.encoders import EncoderStore
from models.training.passes import TokenTable
from models.training.recipe import Recipe
from models.training.run import train
from models.training.shapes import check
from models.training.texts import Texts
from models.training.vectors import Reader, fit_projection, read_once
from tests.support.toy_training import DOCUMENTS, ONE, QUERIES, toy_encoder, write_start

Make = Callable[..., Recipe]
TEXTS = Texts(Side.DOCUMENT, DOCUMENTS)
SHARE = 0.3


def unit(rows: int, dim: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def recipe(toy_recipe: Make, tmp_path: Path) -> Recipe:
    """A pair whose documents are read by a decoder and by a BERT of another start; queries get a projection."""
    write_start(tmp_path / "small", "bert", layers=1)
    values = toy_recipe(document="document", loss={"mse": 1.0}).model_dump(mode="json")
    values["stages"]["tune"]["document"], encoders = "joined", values["encoders"]
    encoders["query"] |= {"projection": 128, "dim": 128}
    values["dim"] = 64
    encoders["document"]["document_instruction"] = "read: "
    encoders["small"] = {"start": str(tmp_path / "small"), "pooling": "cls", "max_length": 40}
    encoders["joined"] = {
        "copy_of": "document", "pooling": "eos", "max_length": 40, "document_instruction": "read: ",
        "beside": {"encoder": "small", "share": SHARE},
    }  # fmt: skip
    return Recipe.model_validate(values)


def test_cosines_of_joined_vectors_are_weighted_means() -> None:
    first, second = unit(20, 8, seed=1), unit(20, 6, seed=2)
    whole = side_by_side([first, second], SHARE)
    expected = (1 - SHARE) * first @ first.T + SHARE * second @ second.T
    np.testing.assert_allclose(whole @ whole.T, expected, atol=1e-6)
    np.testing.assert_allclose(join([first, second], SHARE, np.eye(14, dtype=np.float32)), whole, atol=1e-6)


def test_a_basis_of_what_queries_reach_keeps_their_inner_products() -> None:
    documents = side_by_side([unit(200, 8, seed=1), unit(200, 6, seed=2)], SHARE)
    columns = unit(14, 5, seed=3)
    queries = unit(20, 5, seed=4) @ columns.T
    matrix = basis(columns, documents.T.astype(np.float64) @ documents, 5)
    assert matrix.shape == (14, 5)
    np.testing.assert_allclose((queries @ matrix) @ (documents @ matrix).T, queries @ documents.T, atol=1e-6)


def test_the_first_columns_of_a_basis_are_those_that_texts_vary_most_in() -> None:
    spread = np.diag(np.arange(1.0, 9.0))
    matrix = basis(np.eye(8, dtype=np.float32), spread, 3)
    np.testing.assert_allclose(np.abs(matrix), np.eye(8)[:, [7, 6, 5]], atol=1e-6)


def test_a_run_reads_writes_and_serves_the_same_joined_vectors(recipe: Recipe, tmp_path: Path) -> None:
    store = EncoderStore(recipe, tmp_path / "run", ONE)
    kept = np.asarray(read_once("joined", TEXTS, store, tmp_path), dtype=np.float32)
    assert kept.shape == (len(DOCUMENTS), 128)
    np.testing.assert_allclose(np.linalg.norm(kept, axis=1), 1, atol=1e-2)
    again = read_once("joined", TEXTS, store, tmp_path)
    np.testing.assert_array_equal(kept, np.asarray(again, dtype=np.float32))
    store.copy("joined", tmp_path / "joined")
    opened = open_packed(tmp_path / "joined", device="cpu", precision=Precision.FP32)
    assert isinstance(opened, JoinedEncoder)
    np.testing.assert_allclose(opened.encode(DOCUMENTS, Side.DOCUMENT), kept, atol=2e-3)
    judged = open_encoder(f"{tmp_path / 'joined'},precision=fp32")
    np.testing.assert_allclose(judged.read(DOCUMENTS, Side.DOCUMENT, "read: "), kept, atol=2e-3)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not cached"])
def test_the_second_encoder_does_not_read_the_instruction_of_a_task(
    recipe: Recipe, tmp_path: Path, cached: bool
) -> None:
    store = EncoderStore(recipe, tmp_path / "run", ONE)
    read_once("joined", TEXTS, store, tmp_path)
    store.copy("joined", tmp_path / "joined")
    second = TorchEncoder.load(tmp_path / "joined" / BESIDE).encode(QUERIES, Side.DOCUMENT)
    options = LineupOptions(encoders=[f"{tmp_path / 'joined'},precision=fp32"], bm25=False, hybrid=False)
    task = replace(plain_task("toy", RetrievalSet("toy", [], [], [], [], {}), Kind.RETRIEVAL), query_instruction="找")
    with ExitStack() as stack:
        (system,) = Lineup(options, tmp_path / "cache", stack, lambda count: None).dense
        found = system.reader.read(QUERIES, Side.QUERY, task, cached=cached)
    np.testing.assert_allclose(found[:, 64:] / np.sqrt(SHARE), second, atol=2e-3)


def test_an_evaluation_tries_other_shares_and_reads_once(recipe: Recipe, tmp_path: Path) -> None:
    store = EncoderStore(recipe, tmp_path / "run", ONE)
    kept = np.asarray(read_once("joined", TEXTS, store, tmp_path), dtype=np.float32)
    store.copy("joined", tmp_path / "joined")
    address = f"{tmp_path / 'joined'},precision=fp32"
    with ExitStack() as stack:
        options = LineupOptions(encoders=[address, f"{address},share=0.8"], bm25=False, hybrid=False)
        plain, other = Lineup(options, tmp_path / "cache", stack, lambda count: None).dense
        task = plain_task("toy", RetrievalSet("toy", ["1"], DOCUMENTS[:1], ["1"], DOCUMENTS[:1], {}), Kind.RETRIEVAL)
        np.testing.assert_allclose(plain.reader.read(DOCUMENTS, Side.DOCUMENT, task), kept, atol=2e-3)
        assert isinstance(other.reader, EncoderReader)
        assert not other.reader._cache.find([f"read: {text}" for text in DOCUMENTS], np.empty((12, 128), np.float32))
        parts = [kept[:, :64] / np.sqrt(1 - SHARE), kept[:, 64:] / np.sqrt(SHARE)]
        found = other.reader.read(DOCUMENTS, Side.DOCUMENT, task)
        np.testing.assert_allclose(found, side_by_side(parts, 0.8), atol=3e-3)
        assert (plain.facts.name, other.facts.name) == ("joined (fp32)", "joined (fp32) share 0.8")
        assert plain.facts.fingerprint != other.facts.fingerprint


def test_another_matrix_changes_the_vectors_but_not_what_was_read(recipe: Recipe, tmp_path: Path) -> None:
    store = EncoderStore(recipe, tmp_path / "run", ONE)
    store.copy("joined", tmp_path / "one")
    store.copy("joined", tmp_path / "other", {"weight": np.eye(128, dtype=np.float32)[:, :96]})
    one, other = (open_packed(tmp_path / name, device="cpu", precision=Precision.FP32) for name in ("one", "other"))
    assert isinstance(one, JoinedEncoder)
    assert isinstance(other, JoinedEncoder)
    assert one.parts_fingerprint == other.parts_fingerprint
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("precision=fp32,share=1", "between 0 and 1"),
        ("precision=fp32,share=half", "between 0 and 1"),
        ("share=0.5", "only with a precision"),
    ],
)
def test_a_share_without_a_meaning_is_refused(recipe: Recipe, tmp_path: Path, options: str, message: str) -> None:
    store = EncoderStore(recipe, tmp_path / "run", ONE)
    read_once("joined", TEXTS, store, tmp_path)
    store.copy("joined", tmp_path / "joined")
    with pytest.raises(BadEncoder, match=message):
        open_encoder(f"{tmp_path / 'joined'},{options}")
    with pytest.raises(BadEncoder, match="leave it out"):
        open_encoder(f"{tmp_path / 'joined/beside'},precision=fp32,share=0.5")


@pytest.mark.parametrize("hidden", [0, 32])
def test_a_trained_pair_is_written_in_fewer_dimensions_with_the_same_rankings(
    recipe: Recipe, tmp_path: Path, hidden: int
) -> None:
    dim = 64 + hidden  # as many directions as the features of a query have numbers
    values = recipe.model_dump(mode="json") | {"dim": dim}
    values["encoders"]["query"]["hidden"] = hidden
    for name in ("document", "small", "joined"):
        values["encoders"][name]["dim"] = 64
    recipe = Recipe.model_validate(values)
    folders = {folder.name: folder for folder in train(recipe, tmp_path / "run", ONE)}
    trained, query = TorchEncoder.load(tmp_path / "run/tune/query"), TorchEncoder.load(folders["query"])
    document = open_packed(folders["joined"], device="cpu", precision=Precision.FP32)
    assert (trained.spec.dim, query.spec.dim, document.spec.dim) == (128, dim, dim)
    wide = np.asarray(read_once("joined", TEXTS, EncoderStore(recipe, tmp_path / "run", ONE), tmp_path / "run/tune"))
    assert isinstance(document, JoinedEncoder)
    parts, tensors = document.parts(DOCUMENTS, Side.DOCUMENT), load_file(folders["joined"] / JOIN_FILE)
    vectors, weight = document.joined(parts, Side.QUERY), tensors["weight"]
    lengths = np.linalg.norm(wide.astype(np.float32) @ weight, axis=1)
    expected = trained.encode(DOCUMENTS, Side.QUERY) @ wide.T.astype(np.float32)
    np.testing.assert_allclose(query.encode(DOCUMENTS, Side.QUERY) @ vectors.T * lengths, expected, atol=4e-3)
    with np.load(tmp_path / "run/start/sample.npz") as sample:
        asked, read = query.encode(sample["queries"].tolist(), Side.QUERY), sample["documents"] @ weight
    np.testing.assert_allclose(tensors["queries"], asked, atol=1e-3)
    hubs = Hubs.of(asked, read / np.linalg.norm(read, axis=1, keepdims=True))
    np.testing.assert_allclose(document.encode(DOCUMENTS, Side.DOCUMENT), hubs.moved(vectors), atol=2e-3)
    written = (folders["query"] / SPEC_FILE).stat().st_mtime_ns
    assert train(recipe, tmp_path / "run", ONE) == list(folders.values())
    assert (folders["query"] / SPEC_FILE).stat().st_mtime_ns == written


@pytest.mark.parametrize("hidden", [0, 32])
def test_a_folded_encoder_is_the_one_that_its_folder_holds(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: int
) -> None:
    values = recipe.model_dump(mode="json")
    values["encoders"]["query"]["hidden"] = hidden
    store = EncoderStore(Recipe.model_validate(values), tmp_path / "run", ONE)
    read_once("joined", TEXTS, store, tmp_path)
    store.keep("query", store.open("query", trained=True), tmp_path / "query")
    store.keep_sample(DOCUMENTS, np.asarray(read_once("joined", TEXTS, store, tmp_path)))
    folded: list[TorchEncoder] = []
    save = TorchEncoder.save

    def record(encoder: TorchEncoder, folder: Path) -> None:
        folded.append(encoder)
        save(encoder, folder)

    monkeypatch.setattr(TorchEncoder, "save", record)
    store.fold("query", tmp_path / "folded")
    opened = TorchEncoder.load(tmp_path / "folded")
    for encoder in (*folded, opened):
        assert encoder.projection is not None
        assert (encoder.projection.out_features, encoder.projection.hidden_units) == (64, hidden)
    np.testing.assert_array_equal(folded[0].encode(DOCUMENTS, Side.QUERY), opened.encode(DOCUMENTS, Side.QUERY))


@pytest.mark.parametrize("hidden", [0, 16])
def test_a_projection_is_fitted_to_its_targets(hidden: int) -> None:
    plain = toy_encoder("bert").eval()
    width = plain.spec.native_dim
    wanted = torch.from_numpy(plain.encode(DOCUMENTS, Side.DOCUMENT))
    turn = torch.linalg.qr(torch.randn(wanted.shape[1], wanted.shape[1]))[0]
    projection = Projection(width, width, hidden=hidden)
    encoder = TorchEncoder(plain.backbone, plain.spec, plain.tokenizer_json, projection).eval()
    table = TokenTable.build(TEXTS, encoder.spec, encoder.tokenizer, ONE)
    reader = Reader(encoder, ONE, tokens=60, precision="fp32")
    before = (torch.from_numpy(reader.all(table)) * (wanted @ turn)).sum(dim=1)
    fit_projection(reader, table, wanted @ turn)
    after = (torch.from_numpy(reader.all(table)) * (wanted @ turn)).sum(dim=1)
    assert after.min() > 0.99 > before.mean()


@pytest.mark.parametrize("name", [JOIN_FILE, f"{BESIDE}/{SPEC_FILE}", f"{BESIDE}/model.safetensors"])
def test_an_altered_part_is_refused(recipe: Recipe, tmp_path: Path, name: str) -> None:
    store = EncoderStore(recipe, tmp_path / "run", ONE)
    read_once("joined", TEXTS, store, tmp_path)
    store.copy("joined", tmp_path / "joined")
    path = tmp_path / "joined" / name
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(BadEncoder, match="altered"):
        open_packed(tmp_path / "joined", device="cpu")


def test_torch_alone_does_not_read_half_of_a_joined_folder(recipe: Recipe, tmp_path: Path) -> None:
    store = EncoderStore(recipe, tmp_path / "run", ONE)
    read_once("joined", TEXTS, store, tmp_path)
    store.copy("joined", tmp_path / "joined")
    with pytest.raises(BadEncoder, match="two encoders side by side"):
        TorchEncoder.load(tmp_path / "joined")


@pytest.mark.parametrize(("changes", "reason"), [
    ({"joined": {"beside": {"encoder": "no-such", "share": 0.3}}}, "is not an encoder that stands alone"),
    ({"joined": {"beside": {"encoder": "query", "share": 0.3}}}, "can be trained"),
    ({"document": {"beside": {"encoder": "small", "share": 0.4}}}, "one beside"),
])  # fmt: skip
def test_what_cannot_be_joined_is_refused(recipe: Recipe, changes: dict[str, dict[str, object]], reason: str) -> None:
    values = recipe.model_dump(mode="json")
    for name, change in changes.items():
        values["encoders"][name] |= change
    with pytest.raises(ValidationError, match=reason):
        Recipe.model_validate(values)


def test_more_dimensions_than_the_query_encoder_has_are_refused(recipe: Recipe) -> None:
    """They would be written in fewer than the recipe says."""
    own = {name: config.model_copy(update={"dim": config.dim or 64}) for name, config in recipe.encoders.items()}
    check(recipe.model_copy(update={"encoders": own}))
    with pytest.raises(BadEncoder, match="the recipe 65; set the recipe's dim to at most 64"):
        check(recipe.model_copy(update={"encoders": own, "dim": 65}))


@pytest.mark.parametrize("own", [{"bias": True}, {"tanh": True}])
def test_a_projection_that_cannot_be_folded_is_refused_at_once(
    recipe: Recipe, tmp_path: Path, own: dict[str, bool]
) -> None:
    Projection(64, 128, **own).save(Path(str(recipe.encoders["query"].start)) / PROJECTION_FILE)
    with pytest.raises(BadEncoder, match="remove it there to begin a "):
        train(recipe, tmp_path / "run", ONE)


def test_vectors_that_vanish_are_not_read_as_something_else(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reader, "keep", lambda self, texts, path, scratch: None)
    with pytest.raises(CareError, match="vectors are gone"):
        read_once("joined", TEXTS, EncoderStore(recipe, tmp_path / "run", ONE), tmp_path)
