"""Fixtures and options that tests of several folders share."""

from __future__ import annotations

import gc
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from models.encoder.onnx import OnnxEncoder

# Needs packages that are not in the development environment.
collect_ignore = [] if find_spec("moto") and find_spec("s3fs") else ["integration/test_index_s3.py"]

# A machine may pause for longer than hypothesis allows an example.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds options: larger sizes for the tests that kill processes, and resources of other machines."""
    group = parser.getgroup("care", "CARE Search")
    group.addoption("--kills", type=int, help="kills of a build (make kill-index)")
    group.addoption("--documents", type=int, help="documents of a build that is killed")
    group.addoption("--shard", type=int, default=8, help="texts of a shard of a build that is killed")
    group.addoption("--runs", type=int, default=20, help="runs of writers that are killed (make kill-writes)")
    group.addoption("--seed", type=int, default=0, help="of the kills and of the tenants' requests")
    group.addoption("--requests", type=int, default=1500, help="random requests of tenants (make fuzz-tenants)")
    group.addoption("--fast", action="store_true", help="a stand-in for the encoder")
    group.addoption("--snapshots", help="folder of snapshots, written if it is empty, else compared with this machine")
    group.addoption("--qdrant", help="address of a real Qdrant server, as http://host:6333")


def pytest_collection() -> None:
    """Stops garbage collection during imports of torch and other packages, which would take a fifth longer."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# Slow kinds of tests by the start of their path: `-m "not browser"` leaves one out.
KINDS = {
    "e2e/": "browser",
    "integration/test_ray": "ray",
    "unit/indexer/test_cluster": "ray",
    "integration/test_export_optimum": "optimum",
    "integration/test_mteb": "mteb",
    "unit/evaluation/test_mteb": "mteb",
}


# Folders with the slowest files run first, so that no process is left with a slow one at the end.
FIRST = ("integration/", "unit/training/", "e2e/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def path(item: pytest.Item) -> str:
        return item.path.relative_to(Path(__file__).parent).as_posix()

    items.sort(key=lambda item: not path(item).startswith(FIRST))
    for item in items:
        for beginning, kind in KINDS.items():
            if path(item).startswith(beginning):
                item.add_marker(kind)


@pytest.fixture(scope="session", autouse=True)
def _authorities_are_read_once() -> Iterator[None]:
    """Reads certificate authorities once: otherwise every httpx client reads them, which takes 45 ms."""
    from httpx import create_ssl_context
    from httpx._transports import default

    trusted = create_ssl_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            default,
            "create_ssl_context",
            lambda verify=True, **others: trusted if verify is True else create_ssl_context(verify, **others),
        )
        yield


@pytest.fixture
def keep_signals() -> Iterator[None]:
    """Restores the handler of SIGTERM, which `cli.main` sets."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def encoder() -> OnnxEncoder:
    """Loads the bundled encoder."""
    from models.encoder.onnx import OnnxEncoder

    return OnnxEncoder.load(Path("models/pretrained/care-small-zh"), threads=1)


@pytest.fixture(scope="session")
def example_collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the example corpus as `care demo` serves it, for tests that only read it; queries: BUNDLED_PAIR."""
    from indexer.restore import restore_backup

    examples = Path(__file__).parents[1] / "examples"
    folder = tmp_path_factory.mktemp("examples") / "collection"
    restore_backup(examples / "pair.tar", folder)
    shutil.copy(examples / "page.json", folder)
    return folder
