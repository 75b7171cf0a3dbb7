"""Root of the project's exception tree.

A CareError can be corrected by the caller: its message is one line with what is wrong and what to do next. Any other
exception is a defect.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class CareError(Exception):
    """Any failure whose message is meant for a person; `exit_code` is how a command ends that met it."""

    exit_code = 1


class BadEncoder(CareError):
    """An encoder folder that is incomplete, altered or does not describe itself correctly."""


class EncoderMoved(BadEncoder):
    """A server that no longer gives the vectors that it gave when its encoder folder was written."""


class EncoderAway(CareError):
    """A server that encodes does not answer, or takes no more for now; `expected_seconds`: when to try again."""

    exit_code = 75  # sysexits' EX_TEMPFAIL: try again later

    def __init__(self, message: str, expected_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.expected_seconds = expected_seconds


class OutOfDeviceMemory(CareError):
    """A device that cannot hold the activations of a single text."""


class SpaceMismatch(CareError):
    """Two artefacts whose embeddings live in different spaces were about to meet."""


class ParityError(CareError):
    """An exported graph does not compute what the torch encoder computes."""


class BadData(CareError):
    """A training or evaluation file that cannot be read as what it should be."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name: the known name nearest to it, if one is near."""
    near = get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


class ExportError(CareError):
    """A source, an exporter or an environment that cannot give the graph that was asked for."""
