"""`manifest.json`: what a snapshot is, how it came to be, and the checksum of every file, itself included.

It is written last, so a folder without one is a build that did not finish. Knows nothing of the files' insides.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from indexer.errors import BadSnapshot
from indexer.store.kinds import INDEX_FILE, IndexKind
from models.errors import SpaceMismatch
from models.spec import EncoderSpec, Precision, Variant, sha256_of

MANIFEST_FILE = "manifest.json"
LEXICAL_FOLDER = "lexical"
CORRECTION_FILE = "correction.npy"
FORMAT = 5
# The oldest format that is still read: collections of it go on being served until they are built again.
OLDEST_FORMAT = 1

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DocumentEncoder(_Value):
    """The encoder that read the documents: which function, in which numbers."""

    fingerprint: str
    variant: Variant | Precision


class Counts(_Value):
    documents: Positive
    passages: Positive
    rejects: Count


class Recall(_Value):
    """The share of the exact ten best passages that the index found, over so many queries, and the least allowed."""

    at_10: Share
    queries: Positive
    floor: Share


class Built(_Value):
    """How the snapshot was made: enough to make it again from the same corpus.

    `search_depth` is how far a search looks unless it is told, 0: the least of the index's kind. `recall` was not
    measured where it is None: the index is exact, or of format 1.
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
    """How far the snapshot holds what the service was given: the log's position, and how many of the last documents
    are in no corpus."""

    position: Count = 0
    posted: Count = 0


class Corrected(_Value):
    """Who else read some of the passages, so that what it reads of fresh documents can be corrected.

    `encoders` are the fingerprints of the query encoder's graphs, `passages` is how many of its vectors are kept.
    """

    encoders: Annotated[tuple[str, ...], Field(min_length=1)]
    passages: Positive


class FileEntry(_Value):
    size: Count
    sha256: str


class Facts(_Value):
    """Everything that the maker of a snapshot knows before its files are counted."""

    version: Annotated[str, Field(min_length=1)]
    space: Annotated[str, Field(min_length=1)]
    encoder: DocumentEncoder
    dim: Positive
    counts: Counts
    built: Built
    fresh: Included = Included()
    correction: Corrected | None = None
    query_encoders: tuple[str, ...] = ()
    """Identities of the query encoders that may search the snapshot (`EncoderSpec.identities`)."""


class Manifest(Facts):
    """The content of `manifest.json`, less its own checksum."""

    format: int = FORMAT
    metric: str = "inner_product"
    files: dict[str, FileEntry]

    @property
    def created(self) -> datetime:
        return self.built.created

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    @property
    def content(self) -> str:
        """Names what the snapshot holds, whenever it was made: builds of one corpus in one way have one content.

        The lexical library gives its files random names, which two JSON files repeat; their other bytes count.
        """
        facts = self.model_dump(mode="json", include={"space", "encoder", "dim", "counts", "format"})
        return _checksum(facts | self._file_checksums())

    def is_equal_to(self, other: Manifest) -> bool:
        """Whether both hold the same and were built in the same way.

        The index file does not count: it is made of vectors that do, and a graph differs from build to build.
        """
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
        lexical = {name: entry for name, entry in self.files.items() if name.startswith(f"{LEXICAL_FOLDER}/")}
        named = {name: entry.sha256 for name, entry in self.files.items() if name not in lexical}
        unnamed = sorted((Path(name).suffix, e.sha256) for name, e in lexical.items() if not name.endswith(".json"))
        return {"files": named, "lexical": unnamed}

    def require_encoder(self, spec: EncoderSpec) -> None:
        """Refuses a query encoder that was not made for this snapshot's embeddings.

        Besides those that it names, the document encoder itself may search it, and the encoder that it was corrected
        for: snapshots of before format 5 name none.
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
        """The manifest with this query encoder among those that may search."""
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
        temporary = folder / f".{MANIFEST_FILE}.new"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / MANIFEST_FILE)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Parses and checks the manifest alone; `verify_files` looks at the rest."""
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


def list_files(folder: Path) -> dict[str, FileEntry]:
    """Size and checksum of every file under the folder, by its path with forward slashes.

    Lock files are left out: they are empty, and readers of the lexical index make them anew.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {
        path.relative_to(folder).as_posix(): FileEntry(size=path.stat().st_size, sha256=sha256_of(path))
        for path in paths
    }


def verify_files(folder: Path, manifest: Manifest, *, checksums: bool) -> None:
    """Refuses the folder unless every file is there, has its size and (with `checksums`) its very bytes."""
    for name in manifest.files:
        verify_file(folder, manifest, name, checksum=checksums)


def verify_file(folder: Path, manifest: Manifest, name: str, *, checksum: bool) -> None:
    """Raises BadSnapshot unless the file is what the manifest says."""
    path, entry = folder / name, manifest.files[name]
    if not path.is_file():
        raise BadSnapshot(f"{folder}: {name} is missing; roll back or build again")
    size = path.stat().st_size
    if size != entry.size:
        raise BadSnapshot(f"{folder}: {name} has {size} bytes instead of {entry.size}; roll back or build again")
    if checksum and sha256_of(path) != entry.sha256:
        raise BadSnapshot(f"{folder}: {name} was altered: its checksum differs; roll back or build again")


def _checksum(fields: dict[str, Any]) -> str:
    canonical = json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
