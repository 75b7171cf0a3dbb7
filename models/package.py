"""What an installed copy of this package brings along: its version and the bundled encoder."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BUNDLED_ENCODER = Path(__file__).parent / "pretrained" / "care-small-zh"


def care_version() -> str:
    try:
        return version("care-search")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
