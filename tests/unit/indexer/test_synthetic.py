from __future__ import annotations

from pathlib import Path

import numpy as np

from indexer.store.collection import Collection
from indexer.store.filters import Equal
from indexer.store.snapshot import Snapshot
from indexer.synthetic import build_synthetic
from models.encoder.spec import EncoderSpec

SPEC = EncoderSpec.load(Path("models/pretrained/care-small-zh"))


def test_a_synthetic_snapshot_can_be_opened_and_searched(tmp_path: Path) -> None:
    collection = Collection(tmp_path)
    version = build_synthetic(collection, SPEC, 300)
    collection.publish(version)
    snapshot = Snapshot.open(collection.folder(version))
    snapshot.manifest.require_encoder(SPEC)
    assert (len(snapshot.documents), len(snapshot.passages)) == (300, 300)
    vectors = snapshot.vectors.values.astype(np.float32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-2)
    _, rows = snapshot.vectors.search(vectors[[7, 299]], 1)
    assert rows.tolist() == [[7], [299]]
    found, _ = snapshot.lexical.search("高血压", 5)
    assert "高血压" in snapshot.documents.get(int(found[0])).text
    assert np.count_nonzero(snapshot.metadata.select([Equal("kind", "drug")])) == 75
