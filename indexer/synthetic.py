"""Writes a synthetic snapshot of any size for measurements: random vectors and texts in the real file format.

    python -m indexer.synthetic COLLECTION --encoder FOLDER --documents 1000000

It is published for the query encoder in the given folder. Random vectors suit exact search only: approximate indexes
behave differently on real ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from indexer.store.arrays import Scores
from indexer.store.collection import Collection, new_version
from indexer.store.documents import HASH_BYTES
from indexer.store.filters import Metadata
from indexer.store.kinds import IndexKind
from indexer.store.manifest import Built, Counts, DocumentEncoder, Manifest
from indexer.store.writer import SnapshotWriter
from models.encoder.spec import EncoderSpec, Variant

BLOCK_ROWS = 65_536
NO_HASH = np.zeros((1, HASH_BYTES), np.uint8)
KINDS = ("disease", "drug", "test", "first-aid")
TOPICS = ("高血压", "糖尿病", "发热", "骨折", "哮喘", "头痛", "贫血", "胃炎")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collection", type=Path, help="collection folder to publish in")
    parser.add_argument("--encoder", type=Path, required=True, help="folder of the query encoder that will be served")
    parser.add_argument("--documents", type=int, default=1_000_000, help="how many (%(default)s)")
    arguments = parser.parse_args()
    collection = Collection(arguments.collection)
    version = build_synthetic(collection, EncoderSpec.load(arguments.encoder), arguments.documents)
    collection.publish(version, force=True)
    print(f"published {version}: {arguments.documents} documents")


def build_synthetic(collection: Collection, spec: EncoderSpec, documents: int) -> str:
    """Writes a version of documents of one passage each, for encoders of this space; returns its name."""
    version = new_version()
    built = Built(
        index=IndexKind.FLAT,
        index_parameters={},
        passage_tokens=spec.max_length,
        passage_overlap=0,
        care_version="synthetic",
        created=datetime.now(UTC),
    )
    facts = Manifest(
        version=version,
        space=spec.space,
        encoder=DocumentEncoder(fingerprint="synthetic", variant=Variant.FP32),
        dim=spec.dim,
        query_encoders=tuple(spec.identities),
        counts=Counts(documents=documents, passages=documents, rejects=0),
        built=built,
    )
    with collection.building(version) as folder, SnapshotWriter(folder) as writer:
        for number, text in enumerate(_texts(documents)):
            metadata: Metadata = {"kind": KINDS[number % len(KINDS)], "year": 2000 + number % 26}
            writer.add(f"synthetic-{number}", TOPICS[number % len(TOPICS)], text, metadata, [(0, len(text))], NO_HASH)
        writer.close_documents()
        writer.write_vectors(_vectors(documents, spec.dim), spec.dim)
        writer.write_lexical(_texts(documents), range(documents))
        writer.finish(facts)
    return version


def _vectors(documents: int, dim: int) -> Iterator[Scores]:
    randomly = np.random.default_rng(0)
    for start in range(0, documents, BLOCK_ROWS):
        block = randomly.standard_normal((min(BLOCK_ROWS, documents - start), dim), np.float32)
        yield block / np.linalg.norm(block, axis=1, keepdims=True)


def _texts(documents: int) -> Iterator[str]:
    for number in range(documents):
        first, second = TOPICS[number % len(TOPICS)], TOPICS[number // len(TOPICS) % len(TOPICS)]
        yield f"第{number}条：{first}与{second}的处理和注意事项，仅供测量使用。"


if __name__ == "__main__":
    main()
