"""The rows that did not become documents: counted, the first few remembered, all of them set aside if asked."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import orjson

from indexer.errors import BadCorpus
from indexer.sources import Row

SHOWN = 5


class Rejects:
    """Collects bad rows. With a path they go to that file (JSON lines: file, line, reason, raw), made at need."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.count = 0
        self._first: list[str] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> Rejects:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, row: Row, reason: str) -> None:
        self.count += 1
        if len(self._first) < SHOWN:
            self._first.append(f"{row.place}: {reason}")
        if self.path is not None:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("wb")
            fields = {"file": row.file, "line": row.line, "reason": reason, "raw": row.raw}
            self._file.write(orjson.dumps(fields) + b"\n")

    def refuse(self) -> None:
        """Raises BadCorpus if there are bad rows and nobody said where to set them aside."""
        if self.count and self.path is None:
            more = f"; and {self.count - len(self._first)} more" if self.count > len(self._first) else ""
            raise BadCorpus(
                f"{self.count} bad rows: {'; '.join(self._first)}{more}. Mend them, or set them aside with --skip-bad"
            )
