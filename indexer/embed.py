"""The embedding of every passage of a corpus, at the cost of those that no kept version has.

Vectors are known by content hash: from the versions of the collection that the same encoder made, newest first, then
from the shards of a build that did not finish. Only texts that neither has are encoded, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from indexer.encode import Encoder, Work
from indexer.errors import BadBuild
from indexer.reuse import Reuse, Rows
from indexer.store.arrays import Array, load_array
from indexer.store.collection import Collection
from indexer.store.errors import BadSnapshot
from indexer.store.kinds import VECTORS_FILE
from indexer.store.manifest import Manifest, verify_file
from indexer.store.passages import HASHES_FILE, load_hashes
from indexer.store.shards import Embeddings

TextsOf = Callable[[Rows], Iterable[str]]


def embed(
    hashes: Array, texts_of: TextsOf, encoder: Encoder, collection: Collection, work: Work
) -> tuple[Reuse, int, int]:
    """Every passage's vector, how many texts were encoded, and how many passages had a known vector.

    `texts_of` gives the texts of passage rows. Passages of one text are encoded once.
    """
    reuse = Reuse(hashes)
    for embeddings in _versions(collection, encoder):
        if not reuse.show([embeddings]):
            return reuse, 0, len(hashes)
    reused = len(hashes) - reuse.show(list(work.place.read(encoder.spec.dim)))
    missing = reuse.missing()
    if len(missing):
        work.do(texts_of(missing), len(missing), encoder)
        # Read back rather than remembered: what is used is what the disk has.
        if reuse.show(list(work.place.read(encoder.spec.dim))):
            raise BadBuild(f"{work.place}: what was just written reads otherwise; check the disk, then build again")
    return reuse, len(missing), reused


def _versions(collection: Collection, encoder: Encoder) -> Iterator[Embeddings]:
    """The embeddings of every sound version that this encoder made, newest first."""
    for version in reversed(collection.versions()):
        folder = collection.folder(version)
        try:
            manifest = Manifest.read(folder)
            if manifest.encoder.fingerprint != encoder.fingerprint:
                continue
            for name in (HASHES_FILE, VECTORS_FILE):
                verify_file(folder, manifest, name, checksum=True)
            passages = manifest.counts.passages
            vectors = load_array(folder / VECTORS_FILE, "<f2", (passages, manifest.dim))
            yield Embeddings(load_hashes(folder, passages), vectors)
        except BadSnapshot:  # what a damaged version had is encoded again
            continue
