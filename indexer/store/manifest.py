"""Reads and writes `manifest.json`: what a snapshot is, how it was built, and the checksum of every file.

It is written last: a folder without one is a build that did not finish.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from indexer.errors import BadSnapshot
from indexer.store.files import replace_file
from indexer.store.kinds import INDEX_FILE, IndexKind
from models.encoder.spec import Computed, EncoderSpec, sha256_of
from models.errors import SpaceMismatch

MANIFEST_FILE = "manifest.json"
LEXICAL_FOLDER = "lexical"
CORRECTION_FILE = "correction.npy"
FORMAT = 6
# From here on the lexical index holds documents, before it held passages.
WORDS_OF_DOCUMENTS = 6
# The oldest format that is still read.
OLDEST_FORMAT = 1

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DocumentEncoder(_Value):
    """The encoder that read the documents, and the variant or precision that ran, or that it was a server."""

    fingerprint: str
    variant: Computed
    name: str = ""
    """Its folder's; empty in snapshots of before."""


class Counts(_Value):
    documents: Positive
    passages: Positive
    rejects: Count


class Recall(_Value):
    """The share of the exact ten best passages that the index found, over `queries` queries, and the least allowed."""

    at_10: Share
    queries: Positive
    floor: Share


class Built(_Value):
    """How the snapshot was made: enough to make it again from the same corpus.

    `search_depth` 0 is the least of the index's kind. `recall` is None for an exact index and for format 1.
    """

    index: IndexKind
    index_parameters: dict[str, int]
    search_depth: Count = 0
    recall: Recall | None = None
    passage_tokens: Positive
    passage_overlap: Count
    care_version: str
    created: AwareDatetime


class Included(_Value):
    """The log's position up to which the snapshot holds it, and how many of the last documents are in no corpus."""

    position: Count = 0
    posted: Count = 0


class Corrected(_Value):
    """The query encoder (fingerprints of its graphs) that read `passages` passages, to correct fresh documents."""

    encoders: Annotated[tuple[str, ...], Field(min_length=1)]
    passages: Positive


class FileEntry(_Value):
    size: Count
    sha256: str


class Manifest(_Value):
    """The content of `manifest.json` without its own checksum; `SnapshotWriter.finish` fills in `files`."""

    version: Name
    space: Name
    encoder: DocumentEncoder
    dim: Positive
    counts: Counts
    built: Built
    fresh: Included = Included()
    correction: Corrected | None = None
    query_encoders: tuple[str, ...] = ()
    """Identities of the query encoders that may search the snapshot (`EncoderSpec.identities`)."""
    format: int = FORMAT
    metric: str = "inner_product"
    files: dict[str, FileEntry] = {}

    @property
    def created(self) -> datetime:
        return self.built.created

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    @property
    def content(self) -> str:
        """Identifies what the snapshot holds: equal builds of one corpus have equal content."""
        facts = self.model_dump(mode="json", include={"space", "encoder", "dim", "counts", "format"})
        return _checksum(facts | self._file_checksums())

    def is_equal_to(self, other: Manifest) -> bool:
        """Returns whether both hold the same, built in the same way; index files vary and do not count."""
        return self._made() == other._made()

    def _made(self) -> dict[str, Any]:
        varying = {"index", "index_parameters", "passage_tokens", "passage_overlap"}
        facts = self.model_dump(mode="json", exclude={"version", "built", "files"})
        facts["built"] = self.built.model_dump(mode="json", include=varying)
        facts["floor"] = self.built.recall.floor if self.built.recall else None
        checksums = self._file_checksums()
        checksums["files"].pop(INDEX_FILE, None)
        return facts | checksums

    def _file_checksums(self) -> dict[str, Any]:
        # The lexical library gives its files random names, which its JSON files repeat.
        lexical = {name: entry for name, entry in self.files.items() if name.startswith(f"{LEXICAL_FOLDER}/")}
        named = {name: entry.sha256 for name, entry in self.files.items() if name not in lexical}
        unnamed = sorted((Path(name).suffix, e.sha256) for name, e in lexical.items() if not name.endswith(".json"))
        return {"files": named, "lexical": unnamed}

    def require_encoder(self, spec: EncoderSpec) -> None:
        """Raises SpaceMismatch for a query encoder that was not made for this snapshot's embeddings.

        Besides the admitted ones, the document encoder itself and the corrected one may search: snapshots before format
        5 name none.
        """
        self._require_space(spec)
        fingerprints = {self.encoder.fingerprint, *(self.correction.encoders if self.correction else ())}
        if not (spec.identities & set(self.query_encoders) or spec.fingerprints & fingerprints):
            raise SpaceMismatch(
                f"the query encoder has other weights than those that may search snapshot {self.version}: if it was "
                f"trained for these documents, run care index admit ENCODER_FOLDER {self.version}; else serve the "
                "encoder that the collection was built for, or build again with --query-encoder"
            )

    def admitting(self, spec: EncoderSpec) -> Manifest:
        """Returns the manifest with this query encoder among those that may search."""
        self._require_space(spec)
        return self.model_copy(update={"query_encoders": tuple(sorted({*self.query_encoders, *spec.identities}))})

    def _require_space(self, spec: EncoderSpec) -> None:
        if spec.space != self.space:
            raise SpaceMismatch(
                f"the encoder's space is {spec.space}, snapshot {self.version} was built in {self.space}: "
                "serve it with the encoder of that space, or build the collection again"
            )
        if spec.dim != self.dim:
            raise SpaceMismatch(f"the encoder gives {spec.dim} dimensions, snapshot {self.version} has {self.dim}")

    def write(self, folder: Path) -> None:
        fields = self.model_dump(mode="json")
        text = json.dumps(fields | {"checksum": _checksum(fields)}, ensure_ascii=False, indent=2) + "\n"
        replace_file(folder / MANIFEST_FILE, text.encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Parses and checks the manifest alone; `verify_files` checks the rest."""
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise BadSnapshot(f"{folder} has no {MANIFEST_FILE}: its build did not finish; build it again")
        try:
            fields = json.loads(path.read_bytes())
            if not OLDEST_FORMAT <= fields["format"] <= FORMAT:
                newer = f"{folder} has format {fields['format']}, this program reads up to {FORMAT}"
                raise BadSnapshot(f"{newer}: upgrade care-search")
            checksum = fields.pop("checksum")
            manifest = cls.model_validate(fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise BadSnapshot(f"{path} is damaged ({reason}); roll back or build again") from error
        if checksum != _checksum(fields):
            raise BadSnapshot(f"{path} was altered: its own checksum differs; roll back or build again")
        return manifest

    def verify_files(self, folder: Path, names: Iterable[str] | None = None, *, checksums: bool = True) -> None:
        """Raises BadSnapshot unless the files (all, or those of `names` that the manifest has) are as it says."""
        for name in self.files if names is None else self.files.keys() & set(names):
            path, entry = folder / name, self.files[name]
            if not path.is_file():
                raise BadSnapshot(f"{folder}: {name} is missing; roll back or build again")
            if (size := path.stat().st_size) != entry.size:
                sizes = f"{size} bytes instead of {entry.size}"
                raise BadSnapshot(f"{folder}: {name} has {sizes}; roll back or build again")
            if checksums and sha256_of(path) != entry.sha256:
                raise BadSnapshot(f"{folder}: {name} was altered: its checksum differs; roll back or build again")


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Size and checksum of every file under the folder, by its path with forward slashes."""
    entries = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.suffix != ".lock":  # readers of the lexical index create empty lock files
            entry = FileEntry(size=path.stat().st_size, sha256=sha256_of(path))
            entries[path.relative_to(folder).as_posix()] = entry
    return entries


def _checksum(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
