"""Opens a snapshot for search: verified, memory-mapped and immutable."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from indexer.errors import BadSnapshot
from indexer.store.arrays import Array, load_array
from indexer.store.documents import Documents, Passages, load_hashes
from indexer.store.kinds import VECTORS_FILE
from indexer.store.manifest import CORRECTION_FILE, LEXICAL_FOLDER, WORDS_OF_DOCUMENTS, Manifest
from indexer.store.metadata import MetadataIndex
from models.correction import Correction, sample_rows
from models.errors import CareError
from models.lexical import LexicalIndex

if TYPE_CHECKING:  # loads FAISS, which only a search needs
    from indexer.store.vectors import VectorIndex


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One version of a collection. Threads may share it; the maps close when the last reference goes."""

    folder: Path
    manifest: Manifest
    documents: Documents
    passages: Passages
    hashes: Array
    metadata: MetadataIndex
    values: Array
    """(passages, dim) float16"""
    lexical: LexicalIndex
    sample: Array | None
    """(passages of `manifest.correction`, dim) float16: some of `values` by the query encoder."""

    @cached_property
    def vectors(self) -> VectorIndex:
        """The index over `values`."""
        from indexer.store.vectors import VectorIndex

        built = self.manifest.built
        return VectorIndex.open(self.folder, built.index, self.values, built.search_depth)

    @cached_property
    def correction(self) -> Correction | None:
        """Corrects vectors of fresh documents by the encoders that `manifest.correction` names."""
        if self.sample is None:
            return None
        return Correction.fit(self.sample, self.values[sample_rows(len(self.values), len(self.sample))])

    @cached_property
    def version(self) -> str:
        return self.manifest.version

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True, searched: bool = True) -> Snapshot:
        """Opens a snapshot; raises BadSnapshot with the reason.

        `verify=False` skips checksums, but not sizes and shapes. `searched=False` opens the vector index on first use.
        """
        try:
            manifest = Manifest.read(folder)
            manifest.verify_files(folder, checksums=verify)
        except PermissionError as error:
            step = "change its permissions or its owner, then reload"
            raise BadSnapshot(f"{error.filename} may not be read by this user; {step}") from error
        counts, sample = manifest.counts, None
        passages = Passages.open(folder, counts.passages)
        if int(passages.documents[-1]) != counts.documents - 1:
            raise BadSnapshot(f"{folder}: the passages do not belong to {counts.documents} documents; build it again")
        if manifest.correction is not None:
            sample = load_array(folder / CORRECTION_FILE, "<f2", (manifest.correction.passages, manifest.dim))
        words = counts.documents if manifest.format >= WORDS_OF_DOCUMENTS else counts.passages
        snapshot = cls(
            folder=folder,
            manifest=manifest,
            documents=Documents.open(folder, counts.documents),
            passages=passages,
            hashes=load_hashes(folder, counts.passages),
            metadata=MetadataIndex.open(folder, counts.documents),
            values=load_array(folder / VECTORS_FILE, "<f2", (counts.passages, manifest.dim)),
            lexical=_open_lexical(folder / LEXICAL_FOLDER, words),
            sample=sample,
        )
        if searched:
            _ = snapshot.vectors  # opens them now
        return snapshot


def _open_lexical(folder: Path, rows: int) -> LexicalIndex:
    try:
        index = LexicalIndex.load(folder)
    except (OSError, ValueError, CareError) as error:
        raise BadSnapshot(f"{folder} is not a readable lexical index ({error}); build the snapshot again") from error
    if len(index) != rows:
        raise BadSnapshot(f"{folder} has {len(index)} rows instead of {rows}; build the snapshot again")
    return index
