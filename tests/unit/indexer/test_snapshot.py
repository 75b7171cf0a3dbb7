"""A snapshot opens completely or not at all."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest

from indexer.errors import BadSnapshot
from indexer.store.filters import Equal
from indexer.store.kinds import IndexKind
from indexer.store.manifest import FORMAT, MANIFEST_FILE, Corrected, Manifest, list_files
from indexer.store.snapshot import Snapshot
from models.encoder.spec import EncoderSpec
from models.errors import SpaceMismatch
from models.lexical import LexicalIndex
from models.package import BUNDLED_ENCODER
from tests.unit.indexer.support import DIM, ENTRIES, Entry, write_snapshot

# One pattern per file, since the lexical library generates names.
FILES = [
    "manifest.json",
    "documents.bin",
    "documents.offsets.npy",
    "documents.digests.npy",
    "ids.hashes.npy",
    "ids.rows.npy",
    "passages.documents.npy",
    "passages.spans.npy",
    "hashes.npy",
    "vectors.npy",
    "metadata.json",
    *(
        f"metadata.{i}.{part}"
        for i in (0, 1, 2, 3)
        for part in ("codes.npy", "vocabulary.bin", "vocabulary.offsets.npy")
    ),
    "metadata.2.starts.npy",
    "metadata.4.values.npy",
    "lexical/meta.json",
    "lexical/.managed.json",
    *(f"lexical/*.{part}" for part in ("fast", "fieldnorm", "idx", "pos", "store", "term")),
]


@pytest.fixture
def folder(snapshot_folder: Path, tmp_path: Path) -> Path:
    """Copies the snapshot, to be damaged."""
    return Path(shutil.copytree(snapshot_folder, tmp_path / "v1"))


def find(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def test_a_complete_snapshot_opens(snapshot: Snapshot) -> None:
    assert snapshot.version == "v1"
    assert (len(snapshot.documents), len(snapshot.passages), len(snapshot.lexical)) == (4, 5, 4)
    assert snapshot.passages.documents.tolist() == [0, 1, 2, 3, 3]
    assert [snapshot.passages.span(row) for row in (3, 4)] == [(0, 6), (6, 16)]
    assert snapshot.hashes.shape == (5, 16)
    assert snapshot.vectors.search(np.ones((2, DIM), dtype=np.float32), 3)[1].shape == (2, 3)
    assert snapshot.lexical.search("白细胞", 5)[0].tolist() == [3]


def test_the_list_of_files_is_complete(snapshot_folder: Path) -> None:
    manifest = Manifest.read(snapshot_folder)
    assert {find(snapshot_folder, pattern).relative_to(snapshot_folder).as_posix() for pattern in FILES} == {
        *manifest.files,
        "manifest.json",
    }
    assert manifest.size_bytes == sum((snapshot_folder / name).stat().st_size for name in manifest.files)


@pytest.mark.parametrize("pattern", FILES)
def test_a_truncated_file_is_refused(folder: Path, pattern: str) -> None:
    path = find(folder, pattern)
    path.write_bytes(path.read_bytes()[:-1] if pattern != "manifest.json" else path.read_bytes()[:-3])
    for verify in (True, False):
        with pytest.raises(BadSnapshot, match=path.name):
            Snapshot.open(folder, verify=verify)


@pytest.mark.parametrize("pattern", FILES)
def test_an_altered_file_is_refused(folder: Path, pattern: str) -> None:
    path = find(folder, pattern)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadSnapshot, match=path.name):
        Snapshot.open(folder)


@pytest.mark.parametrize("pattern", FILES)
def test_a_missing_file_is_refused(folder: Path, pattern: str) -> None:
    path = find(folder, pattern)
    path.unlink()
    with pytest.raises(BadSnapshot, match=path.name):
        Snapshot.open(folder, verify=False)


def test_a_half_written_folder_is_refused(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(BadSnapshot, match="its build did not finish"):
        Snapshot.open(folder)


def test_the_error_for_a_newer_format_advises_an_upgrade(folder: Path) -> None:
    fields = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(fields | {"format": FORMAT + 1, "colour": "unheard of"}))
    with pytest.raises(BadSnapshot, match=f"has format {FORMAT + 1}, this program reads up to {FORMAT}: upgrade"):
        Snapshot.open(folder)


def as_format_1(folder: Path) -> None:
    """Rewrites a folder in format 1: no digests, vectors also in index.faiss, words by passages, fewer facts."""
    (folder / "documents.digests.npy").unlink()
    manifest = Manifest.read(folder)
    shutil.rmtree(folder / "lexical")
    texts = (f"{entry.title}\n{entry.text[slice(*span)]}" for entry in ENTRIES for span in entry.spans or [(0, None)])
    LexicalIndex.build(texts, folder / "lexical")
    vectors = np.load(folder / "vectors.npy").astype(np.float32)
    metric = faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexHNSWFlat(DIM, 32, metric) if manifest.built.index is IndexKind.HNSW else faiss.IndexFlatIP(DIM)
    index.add(vectors)
    faiss.write_index(index, str(folder / "index.faiss"))
    fields = manifest.model_dump(mode="json") | {"format": 1}
    fields["files"] = {name: entry.model_dump() for name, entry in list_files(folder).items() if name != MANIFEST_FILE}
    del fields["built"]["search_depth"], fields["built"]["recall"]
    canonical = json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(canonical.encode()).hexdigest()
    (folder / MANIFEST_FILE).write_text(json.dumps(fields | {"checksum": checksum}), encoding="utf-8")


@pytest.mark.parametrize("kind", [IndexKind.FLAT, IndexKind.HNSW])
def test_format_1_is_still_read(tmp_path: Path, kind: IndexKind) -> None:
    write_snapshot(tmp_path / "new", kind=kind)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    as_format_1(tmp_path / "old")
    old, new = Snapshot.open(tmp_path / "old"), Snapshot.open(tmp_path / "new")
    assert old.lexical.search("白细胞", 5)[0].tolist() == [4]
    queries = np.ones((2, DIM), dtype=np.float32)
    np.testing.assert_array_equal(old.vectors.search(queries, 3)[1], new.vectors.search(queries, 3)[1])
    rows = np.arange(len(ENTRIES))
    np.testing.assert_array_equal(old.documents.digests(rows), new.documents.digests(rows))


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "1"}', '{"format": 2, "checksum": "x"}', "\x00"])
def test_an_invalid_manifest_is_refused(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    with pytest.raises(BadSnapshot, match=r"manifest\.json is damaged"):
        Snapshot.open(folder)


def test_a_manifest_edited_by_hand_is_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("test-space", "evil-space"))
    with pytest.raises(BadSnapshot, match="its own checksum differs"):
        Snapshot.open(folder)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("passages", {"documents": 4, "passages": 6}), ("documents", {"documents": 3, "passages": 5})],
)
def test_counts_that_disagree_with_the_files_are_refused(folder: Path, name: str, counts: dict[str, int]) -> None:
    manifest = Manifest.read(folder)
    wrong = manifest.counts.model_copy(update=counts)
    manifest.model_copy(update={"counts": wrong}).write(folder)
    with pytest.raises(BadSnapshot, match=name):
        Snapshot.open(folder)


def test_a_lexical_index_of_another_size_is_refused(folder: Path, tmp_path: Path) -> None:
    write_snapshot(tmp_path / "other", ENTRIES[:2])
    shutil.rmtree(folder / "lexical")
    shutil.copytree(tmp_path / "other" / "lexical", folder / "lexical")
    manifest = Manifest.read(folder)
    others = Manifest.read(tmp_path / "other").files
    files = {name: entry for name, entry in manifest.files.items() if not name.startswith("lexical/")}
    files |= {name: entry for name, entry in others.items() if name.startswith("lexical/")}
    manifest.model_copy(update={"files": files}).write(folder)
    with pytest.raises(BadSnapshot, match="lexical has 2 rows instead of 4"):
        Snapshot.open(folder)


def test_files_of_the_lexical_library_have_the_mode_of_the_others(snapshot_folder: Path) -> None:
    modes = {path.stat().st_mode for path in snapshot_folder.rglob("*") if path.is_file()}
    assert len(modes) == 1


def test_an_hnsw_snapshot_opens_and_its_graph_is_checked(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "v1", kind=IndexKind.HNSW)
    assert Snapshot.open(tmp_path / "v1").vectors.kind is IndexKind.HNSW
    graph = tmp_path / "v1" / "index.faiss"
    graph.write_bytes(graph.read_bytes()[:-1])
    with pytest.raises(BadSnapshot, match=r"index\.faiss"):
        Snapshot.open(tmp_path / "v1", verify=False)


def test_the_content_hash_does_not_depend_on_the_time_of_the_build(tmp_path: Path) -> None:
    first = write_snapshot(tmp_path / "v1")
    again = write_snapshot(tmp_path / "v2", version="v2")
    assert first.files != again.files  # the lexical library generates names
    assert first.content == again.content
    assert write_snapshot(tmp_path / "v3", ENTRIES[:3]).content != first.content
    other = ENTRIES[3]
    relabelled = Entry(other.id, other.text, other.title, {"updated": "2025-03-02"}, other.spans)
    assert write_snapshot(tmp_path / "v4", [*ENTRIES[:3], relabelled]).content != first.content


def test_an_open_snapshot_works_after_its_folder_is_removed(folder: Path) -> None:
    """A request that began on a version ends on it, even if the version is removed meanwhile."""
    snapshot = Snapshot.open(folder)
    shutil.rmtree(folder)
    assert snapshot.documents.get(0).id == "drug-1"
    assert snapshot.lexical.search("白细胞", 5)[0].tolist() == [3]
    assert (snapshot.vectors.search(np.ones((1, DIM), dtype=np.float32), 5)[1] >= 0).all()
    assert snapshot.metadata.select([Equal("kind", "drug")]).tolist() == [True, True, False, False]


def test_other_weights_with_the_same_name_are_refused_until_admitted(tmp_path: Path) -> None:
    def spec(checksum: str) -> EncoderSpec:
        return EncoderSpec.model_validate(
            {"architecture": "bert", "sides": ["query"], "pooling": "cls", "native_dim": 64, "dim": DIM}
            | {"max_length": 512, "space": "test-space", "checksums": {"model.int8.onnx": checksum}}
        )

    folder, known, other = tmp_path / "v1", spec("known"), spec("other")
    manifest = write_snapshot(folder).admitting(known)
    manifest.write(folder)
    Manifest.read(folder).require_encoder(known)
    with pytest.raises(SpaceMismatch, match=r"other weights .* care index admit ENCODER_FOLDER v1"):
        Manifest.read(folder).require_encoder(other)
    manifest.admitting(other).write(folder)
    again = Snapshot.open(folder).manifest
    again.require_encoder(known)
    again.require_encoder(other)
    assert again.content == manifest.content


def test_a_snapshot_that_names_no_query_encoder_admits_its_document_encoder(tmp_path: Path) -> None:
    """As before format 5, and for the encoder that they were corrected for."""
    bundled = EncoderSpec.load(BUNDLED_ENCODER)
    manifest = write_snapshot(tmp_path, space=bundled.space, dim=bundled.dim)
    with pytest.raises(SpaceMismatch, match="other weights"):
        manifest.require_encoder(bundled)
    (own,) = bundled.fingerprints
    encoder = manifest.encoder.model_copy(update={"fingerprint": own})
    manifest.model_copy(update={"encoder": encoder}).require_encoder(bundled)
    corrected = Corrected(encoders=(own,), passages=1)
    manifest.model_copy(update={"correction": corrected}).require_encoder(bundled)


def test_an_encoder_of_another_space_or_dimension_is_refused(snapshot: Snapshot) -> None:
    def spec(space: str, dim: int) -> EncoderSpec:
        return EncoderSpec.model_validate(
            {"architecture": "bert", "sides": ["query"], "pooling": "cls", "native_dim": 64, "dim": dim}
            | {"max_length": 512, "space": space}
        )

    with pytest.raises(SpaceMismatch, match="the encoder's space is other, snapshot v1 was built in test-space"):
        snapshot.manifest.require_encoder(spec("other", DIM))
    with pytest.raises(SpaceMismatch, match=f"gives 64 dimensions, snapshot v1 has {DIM}"):
        snapshot.manifest.require_encoder(spec("test-space", 64))
