"""`care index` as a schedule calls it: one line, one exit code, and nothing published by mistake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import cli
from indexer.build import BuildOptions
from indexer.errors import BadCollection
from indexer.reindex import Encoders, Release, reindex
from indexer.report import Report
from indexer.store.collection import Collection
from indexer.store.fresh_log import Deleted, Posted
from indexer.store.manifest import Manifest
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import EncoderSpec, Side
from models.errors import SpaceMismatch

pytestmark = pytest.mark.usefixtures("keep_signals")

ROWS = [
    {"_id": "hypertension", "title": "高血压用药", "text": "氨氯地平是治疗高血压的常用药。"},
    {"_id": "diabetes", "title": "糖尿病饮食", "text": "糖尿病人应当控制主食，监测血糖。"},
    {"_id": "fever", "title": "发热处理", "text": "发热超过38.5度可以服用布洛芬。"},
]
VECTOR = np.eye(1, 512, dtype=np.float16)
BUNDLED = Path("models/pretrained/care-small-zh")


class Place:
    """A corpus and a collection, with `care index` run on them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.collection = Collection(folder / "collection")
        self._capsys = capsys

    def write(self, name: str, rows: list[dict[str, object]]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    def care(self, action: str, *arguments: object) -> tuple[int, str, str]:
        words = [*map(str, arguments), "--collection", str(self.collection.root)]
        code = cli.main(["index", action, *words])
        message = self._capsys.readouterr()
        return code, message.out, message.err

    def build(self, rows: list[dict[str, object]], *arguments: object) -> tuple[int, str, str]:
        return self.care("build", self.write("corpus.jsonl", rows), "--threads", 1, *arguments)

    def metric(self, name: str) -> float:
        families = text_string_to_metric_families((self.folder / "care.prom").read_text())
        return next(sample.value for family in families for sample in family.samples if sample.name == name)


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, capsys)


def test_an_unchanged_corpus_adds_no_version(place: Place) -> None:
    place.build(ROWS, "--publish", "--keep", 2)
    served = place.collection.current()
    metrics = ("--metrics-file", place.folder / "care.prom")
    code, out, err = place.build(ROWS, "--publish", "--keep", 2, *metrics)
    assert (code, err) == (0, "")
    assert out.startswith(f"unchanged {served}: 3 documents (0 added, 0 changed, 0 removed)")
    assert (place.collection.versions(), place.collection.current()) == ([served], served)
    assert place.metric("care_index_run_success") == 1
    # Other options or a damaged version cause a build.
    assert place.build(ROWS, "--publish", "--overlap", 8)[1].startswith("published ")
    (place.collection.folder(place.collection.current() or "") / "hashes.npy").write_bytes(b"damaged")
    assert place.build(ROWS, "--publish", "--overlap", 8)[1].startswith("published ")
    assert len(place.collection.versions()) == 3


def test_the_output_names_columns_that_were_not_kept(place: Place) -> None:
    rows = [row | {"kind": "drug", "url": "x"} for row in ROWS]
    _, out, _ = place.build(rows, "--metadata-field", "kind")
    assert "columns that were not kept: url (keep them with --metadata-field NAME)" in out
    assert "not kept" not in place.build(ROWS)[1]
    assert "not kept" not in place.build([row | {"": ""} for row in ROWS])[1]  # a trailing comma in CSV
    assert "not kept" not in place.build([row | {"year": "2024"} for row in ROWS], "--number-field", "year")[1]


def test_a_corpus_that_lost_most_of_its_rows_is_not_published(place: Place) -> None:
    """The error has the numbers and the option; documents deleted through the service do not count as missing."""
    many: list[dict[str, object]] = [{"_id": f"d{number}", "text": f"正文 {number}"} for number in range(10)]
    assert place.build(many, "--publish")[0] == 0
    served = place.collection.current()
    code, out, err = place.build(many[:7], "--publish", "--metrics-file", place.folder / "care.prom")
    assert (code, out, place.collection.current()) == (1, "", served)
    assert "3 of the 10 served documents of the corpus would vanish (30.0%; at most 20.0% may)" in err
    assert "--max-removed 0.3" in err
    assert place.metric("care_index_run_success") == 0
    assert place.build(many[:7])[0] == 0  # building does not publish
    assert place.build(many[:8], "--publish")[0] == 0
    place.collection.fresh_log.append([Deleted("d0"), Deleted("d1"), Deleted("d2")])
    assert place.build(many[:8], "--publish")[0] == 0
    assert place.build(many[5:8], "--publish", "--max-removed", 0.5)[0] == 0


def test_posted_documents_do_not_hide_a_loss_of_the_corpus(place: Place) -> None:
    many: list[dict[str, object]] = [{"_id": f"d{number}", "text": f"正文 {number}"} for number in range(4)]
    assert place.build(many, "--publish")[0] == 0
    place.collection.fresh_log.append(
        [Posted(f"p{number}", "", "新的", {}, ((0, 2),), "other", VECTOR) for number in range(6)]
    )
    assert place.build(many, "--publish")[0] == 0
    code, _, err = place.build(many[:3], "--publish")
    assert code == 1
    assert "1 of the 4 served documents of the corpus would vanish" in err


def test_a_rollback_is_refused_if_the_query_encoder_is_not_admitted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(manifest: Manifest, spec: EncoderSpec) -> None:
        raise SpaceMismatch(f"run care index admit ENCODER_FOLDER {manifest.version}")

    assert place.build(ROWS[1:], "--publish")[0] == 0
    assert place.build(ROWS, "--publish")[0] == 0
    older, served = place.collection.versions()
    monkeypatch.setattr(Manifest, "require_encoder", refuse)
    code, _, err = place.care("rollback")
    assert (code, place.collection.current()) == (1, served)
    assert f"care index admit ENCODER_FOLDER {older}" in err
    assert place.care("rollback", "--force")[0] == 0


def test_a_run_prints_one_line_and_encodes_only_changes(place: Place) -> None:
    code, out, err = place.build(ROWS[:2], "--publish")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert out.startswith(f"published {place.collection.current()}: 2 documents (2 added, 0 changed, 0 removed)")
    code, out, err = place.build([ROWS[0] | {"metadata": {"year": 2026}}, ROWS[2]], "--publish", "--max-removed", 0.5)
    assert (code, err) == (0, "")
    assert "2 documents (1 added, 1 changed, 1 removed), 2 passages (1 encoded, 1 reused)" in out


def test_a_version_with_failing_canaries_is_not_published(place: Place) -> None:
    canaries = place.write("canaries.jsonl", [{"query": "血压高吃什么药", "must": ["hypertension"], "within": 1}])
    release = ("--publish", "--max-removed", 1, "--canaries", canaries, "--metrics-file", place.folder / "care.prom")
    assert place.build(ROWS, *release)[0] == 0
    served = place.collection.current()
    assert place.metric("care_index_run_success") == 1
    code, out, err = place.build(ROWS[1:], *release)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "1 of 1 canaries fail: '血压高吃什么药' lacks hypertension" in err
    assert place.collection.current() == served
    assert place.metric("care_index_run_success") == 0
    assert place.metric("care_index_published_timestamp_seconds") > 0


def test_a_publish_and_a_rollback_by_hand_run_the_canaries_of_the_collection(place: Place) -> None:
    canaries = place.write("canaries.jsonl", [{"query": "血压高吃什么药", "must": ["hypertension"], "within": 1}])
    assert place.build(ROWS[1:], "--publish")[0] == 0
    assert place.build(ROWS, "--publish", "--canaries", canaries)[0] == 0
    bad, good = place.collection.versions()
    for action, arguments in (("rollback", []), ("rollback", [bad]), ("publish", [bad])):
        code, _, err = place.care(action, *arguments)
        assert (code, place.collection.current()) == (1, good)
        assert "1 of 1 canaries fail: '血压高吃什么药' lacks hypertension" in err
        assert "--force" in err
    assert place.care("rollback", "--force") == (0, f"rolled back from {good} to {bad}\n", "")
    assert place.care("publish", good)[0] == 0
    assert place.care("publish", bad, "--force")[0] == 0
    assert place.build(ROWS[:2], "--publish", "--max-removed", 1)[0] == 0
    assert place.build(ROWS[1:], "--publish", "--max-removed", 1)[0] == 1  # also by a build that does not name them


def test_canaries_see_documents_posted_and_deleted_since_the_build(place: Place) -> None:
    canaries = place.write("canaries.jsonl", [{"query": "氨氯地平", "must": ["hypertension"], "within": 2}])
    assert place.build(ROWS, "--publish", "--canaries", canaries)[0] == 0
    (version,) = place.collection.versions()
    log, encoder = place.collection.fresh_log, OnnxEncoder.load(BUNDLED)
    log.append([Deleted("hypertension")], 0)
    assert "lacks hypertension" in place.care("publish", version)[2]
    text = "氨氯地平片"
    vectors = encoder.encode([text], Side.DOCUMENT).astype(np.float16)
    log.append([Posted("hypertension", "", text, {}, ((0, len(text)),), encoder.fingerprint, vectors)], 1)
    assert place.care("publish", version) == (0, f"published {version}\n", "")


@pytest.mark.parametrize("option", ["--canaries", "--queries"])
def test_queries_that_cannot_be_read_stop_the_run_before_its_work(place: Place, option: str) -> None:
    metrics = ("--metrics-file", place.folder / "care.prom")
    code, _, err = place.build(ROWS, "--publish", option, place.folder / "nowhere", *metrics)
    assert code == 1
    assert "nowhere" in err
    assert place.collection.versions() == []
    assert place.metric("care_index_run_success") == 0


def test_versions_that_fail_are_pruned(place: Place) -> None:
    assert place.build(ROWS, "--publish")[0] == 0
    served = place.collection.current()
    canaries = place.write("canaries.jsonl", [{"query": "发热", "must": ["nowhere"]}])
    for number in range(3):
        rows = [*ROWS, {"_id": f"new-{number}", "text": "新药"}]
        assert place.build(rows, "--publish", "--keep", 1, "--canaries", canaries)[0] == 1
    assert len(place.collection.versions()) == 2
    assert place.collection.versions()[0] == served == place.collection.current()


@pytest.mark.parametrize("action", ["publish", "admit", "rollback", "verify", "diff", "suggest"])
def test_an_empty_version_is_refused(place: Place, action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        place.care(action, *([BUNDLED] if action == "admit" else []), "")
    assert "the version is empty; name one, or leave it out" in capsys.readouterr().err


def test_a_run_keeps_the_version_that_it_built(place: Place) -> None:
    for _ in range(2):
        code, out, _ = place.build(ROWS, "--keep-days", 0)
        assert code == 0
    assert "old versions removed: 1" in out
    assert [f"built {version}" for version in place.collection.versions()] == [out.partition(":")[0]]


def test_old_versions_are_pruned(place: Place) -> None:
    for number in range(4):
        code, out, _ = place.build(ROWS[: 1 + number % 2], "--publish", "--keep", 2, "--max-removed", 1)
        assert code == 0
    assert "old versions removed: 1" in out
    assert len(place.collection.versions()) == 2
    assert place.care("prune", "--keep", 1) == (0, "removed no version\n", "")
    assert place.care("prune")[0] == 1


def another_encoder(folder: Path, **facts: object) -> Path:
    """Copies the bundled encoder with some facts changed."""
    folder.mkdir()
    for path in BUNDLED.iterdir():
        if path.name != "encoder.json":
            (folder / path.name).symlink_to(path.resolve())
    EncoderSpec.load(BUNDLED).model_copy(update=facts).save(folder)
    return folder


def test_a_build_admits_its_encoder_and_keeps_what_was_admitted(place: Place, tmp_path: Path) -> None:
    assert place.build(ROWS, "--publish")[0] == 0
    served = place.collection.current() or ""
    bundled = EncoderSpec.load(BUNDLED)
    Manifest.read(place.collection.folder(served)).require_encoder(bundled)
    other = another_encoder(tmp_path / "other", checksums=bundled.checksums | {"model.int8.onnx": "others"})
    with pytest.raises(SpaceMismatch, match="care index admit"):
        Manifest.read(place.collection.folder(served)).require_encoder(EncoderSpec.load(other))
    code, out, err = place.care("admit", other)
    assert (code, err) == (0, "")
    assert f"may search {served}" in out
    assert place.care("verify")[0] == 0
    assert place.build(ROWS[:2], "--publish", "--max-removed", 1)[0] == 0
    newer = Manifest.read(place.collection.folder(place.collection.current() or ""))
    assert newer.version != served
    for spec in (bundled, EncoderSpec.load(other)):
        newer.require_encoder(spec)
    code, _, err = place.care("admit", another_encoder(tmp_path / "far", space="elsewhere"))
    assert code == 1
    assert "space is elsewhere" in err


def test_other_weights_in_the_same_space_are_not_published_over_a_running_encoder(place: Place, tmp_path: Path) -> None:
    assert place.build(ROWS, "--publish")[0] == 0
    served = place.collection.current()
    moved = Collection(tmp_path / "moved")
    bundled = EncoderSpec.load(BUNDLED)
    other = bundled.model_copy(update={"checksums": bundled.checksums | {"model.int8.onnx": "others"}})
    with pytest.raises(BadCollection, match=r"no query encoder that may search .* --query-encoder"):
        place.collection.require_same_space("folder", bundled.space, bundled.dim, tuple(other.identities))
    place.collection.require_same_space("folder", bundled.space, bundled.dim, tuple(bundled.identities))
    assert place.collection.current() == served
    moved.require_same_space("folder", "any", 1, ())  # if nothing is served, any space is accepted


def test_a_change_of_encoder_is_reported(place: Place, tmp_path: Path) -> None:
    assert place.build(ROWS, "--publish")[0] == 0
    assert place.build(ROWS)[2] == ""
    instructed = another_encoder(tmp_path / "told", document_instruction="为检索表示：")
    code, out, err = place.build(ROWS, "--encoder", instructed)
    assert code == 0
    assert err.count("\n") == 1
    assert "another encoder (" in err
    assert "every passage is encoded again" in err
    assert "(3 encoded, 0 reused)" in out
    code, out, err = place.build(ROWS, "--encoder", instructed)  # its vectors are known, but not served
    assert (code, err) == (0, "")
    assert "(0 encoded, 3 reused)" in out


def test_another_space_is_refused_before_anything_is_encoded(place: Place, tmp_path: Path) -> None:
    assert place.build(ROWS, "--publish")[0] == 0
    versions = place.collection.versions()
    code, out, err = place.build(ROWS, "--publish", "--encoder", another_encoder(tmp_path / "new", space="elsewhere"))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "is in space elsewhere (512 dimensions)" in err
    assert place.collection.versions() == versions
    assert place.build(ROWS, "--encoder", tmp_path / "new")[0] == 0
    assert place.care("publish", "--force")[0] == 0


def test_a_different_served_query_encoder_reads_passages_for_the_correction(place: Place, tmp_path: Path) -> None:
    asking = another_encoder(tmp_path / "asking", document_instruction="文：")
    for folder, passages in ((BUNDLED, None), (asking, len(ROWS))):
        assert place.build(ROWS, "--publish", "--query-encoder", folder)[0] == 0
        version = place.collection.current()
        assert version is not None
        facts = Manifest.read(place.collection.folder(version)).correction
        assert (facts and facts.passages) == passages
    other = another_encoder(tmp_path / "other", space="elsewhere")
    code, _, message = place.build(ROWS, "--query-encoder", other)
    assert (code, len(place.collection.versions())) == (1, 2)
    assert "is of space elsewhere" in message


def test_a_run_stopped_by_a_signal_is_reported(place: Place) -> None:
    def stop(*_: object) -> Iterator[int]:
        signal.raise_signal(signal.SIGTERM)
        yield 0

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    corpus, report = [place.write("corpus.jsonl", ROWS)], Report(place.folder / "care.prom")
    with pytest.raises(SystemExit, match="143"):
        reindex(corpus, place.collection, Encoders(BUNDLED), BuildOptions(encode=stop), Release(), report)
    assert place.metric("care_index_run_success") == 0
    assert list((place.collection.root / "versions").iterdir()) == []


def test_a_second_run_ends_with_75_and_names_the_first(place: Place) -> None:
    with place.collection.sole_builder():
        command = [sys.executable, "cli.py", "index", "build", str(place.write("c.jsonl", ROWS))]
        metrics = place.folder / "care.prom"
        options = ["--collection", str(place.collection.root), "--metrics-file", str(metrics)]
        options += ["--encoder", "nowhere"]  # nothing is opened, since the first run may need the memory
        done = subprocess.run([*command, *options], capture_output=True, text=True)
    holder = (place.collection.root / "LOCK").read_text().strip()
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr == (
        f"care index: process {holder} is at work on {place.collection.root}; wait until it has ended\n"
    )
    assert not metrics.exists()  # the first run writes them


def test_diff_and_suggest_print_a_few_lines(place: Place) -> None:
    assert place.build(ROWS, "--publish")[0] == 0
    assert place.build([ROWS[0], ROWS[1] | {"text": "另一正文"}])[0] == 0
    code, out, _ = place.care("diff")
    assert code == 0
    first, second = place.collection.versions()
    assert out.splitlines()[:5] == [
        f"{first} → {second}",
        "added: 0 documents",
        "changed: 1 documents (diabetes)",
        "removed: 1 documents (fever)",
        "answers: 3 of 3 queries have another top 10",
    ]
    assert place.care("publish")[0] == 0
    assert place.care("diff")[1] == out  # the served version is the newest: compared with the one it replaced
    queries = place.write("queries.jsonl", [{"text": "发烧"}])
    assert "answers: 0 of 1 queries" in place.care("diff", first, first, "--queries", queries)[1]
    code, out, _ = place.care("suggest", "--passages", 10)
    assert code == 0
    assert out.splitlines()[-2] == "ivf-pq and rabitq are not measured: they need 1000 passages"
    assert out.splitlines()[-1].startswith("--index ")
    assert "content " in place.care("verify")[1]
    documents = place.collection.folder(second) / "documents.bin"
    documents.write_bytes(b"!" * documents.stat().st_size)
    for action in ("diff", "suggest"):
        code, out, err = place.care(action)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "documents.bin was altered" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recall-floor", "1.5"], "is not a number between 0 and 1"),
        (["--recall-floor", "x"], "is not a number between 0 and 1"),
        (["--keep", "0"], "is not a whole number above 0"),
        (["--threads", "5000"], "5000 is more than 1024; give the number of cores, or leave it out"),
        (["--shard", "10000000000000000000"], "10000000000000000000 is more than 2147483647; give a smaller number"),
        (["--keep-days", "-1"], "is not a number of days"),
        (["--webhook", "file:///etc/passwd"], "begins with http"),
    ],
)
def test_wrong_options_give_a_one_line_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["index", "build", "corpus.jsonl", *arguments])
    assert end.value.code == 1
    assert message in capsys.readouterr().err
