"""Settings as they reach the processes of a service, and the parts of a process beside a separate engine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import EncoderSpec, Side
from models.encoder.tokenizer import TextReader
from models.errors import BadEncoder
from models.fusion import Mode
from service.engine.local import Batcher
from service.engine.queue import Limits
from service.engine.remote.client import RemoteEngine
from service.metrics import Metrics
from service.processes.startup import OneLine
from service.processes.supervisor import environment_of
from service.runtime import load_models, open_home
from service.settings import Settings

ENCODER = Path("models/pretrained/care-small-zh")


def test_a_process_gets_the_settings_of_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Settings(
        collection=Path("some where/else"),
        default_mode=Mode.LEXICAL,
        workers=3,
        device="cuda",
        reload_seconds=0.25,
        verify=False,
        admin_token="s3cret",  # type: ignore[arg-type]
        redis_url="redis://127.0.0.1/0",
        batch_queries=7,
    )
    monkeypatch.setenv("CARE_WORKERS", "99")  # a flag overrides the environment, in the children too
    for name, value in environment_of(given).items():
        monkeypatch.setenv(name, value)
    assert Settings() == given
    assert Path(os.environ["PYTHONPATH"].split(os.pathsep)[0], "service").is_dir()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


@pytest.mark.parametrize(
    ("values", "process"),
    [({}, False), ({"workers": 4}, False), ({"engine": "process"}, True), ({"device": "cuda"}, True)],
)
def test_a_gpu_gets_an_engine_process_and_a_cpu_only_on_request(values: dict[str, object], process: bool) -> None:
    assert Settings(**values).has_engine_process == process  # type: ignore[arg-type]


def test_a_gpu_has_larger_batches_by_default() -> None:
    cpu = Limits.from_settings(Settings())
    assert (cpu.batch_queries, cpu.batch_tokens) == (8, 4096)
    gpu = Limits.from_settings(Settings(device="cuda"))
    assert (gpu.batch_queries, gpu.batch_tokens) == (256, 32_768)
    assert Limits.from_settings(Settings(device="cuda", batch_queries=5, batch_tokens=50)).batch_queries == 5
    assert Limits.from_settings(Settings(max_wait_ms=250)).wait_seconds == 0.25


def test_a_worker_beside_an_engine_process_loads_no_weights() -> None:
    settings, metrics, socket = Settings(encoder=ENCODER), Metrics(), Path("engine.sock")
    (here, _), (there, _) = load_models(settings, None), load_models(settings, socket)
    assert isinstance(here, OnnxEncoder)
    assert type(there) is TextReader
    assert (there.fingerprint, there.variant, there.spec) == (here.fingerprint, here.variant, here.spec)
    assert there.tokenize(["发热"], Side.QUERY) == here.tokenize(["发热"], Side.QUERY)
    assert isinstance(open_home(settings, metrics, None), Batcher)
    assert isinstance(open_home(settings, metrics, socket), RemoteEngine)


def test_an_encoder_that_reads_no_queries_is_refused(tmp_path: Path) -> None:
    EncoderSpec.load(ENCODER).model_copy(update={"sides": (Side.DOCUMENT,)}).save(tmp_path)
    with pytest.raises(BadEncoder, match="CARE_ENCODER"):
        load_models(Settings(encoder=tmp_path), None)


def test_a_worker_beside_an_engine_process_imports_no_onnx_runtime() -> None:
    code = "import sys, service.processes.server, service.engine.remote.client; print('onnxruntime' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


def test_text_of_a_client_forges_no_line_of_the_log() -> None:
    forged = "x\n2026-01-01 00:00:00,000 ERROR care: all is lost\x1b[2J\x85\u2028"
    record = logging.LogRecord("care", logging.ERROR, __file__, 1, "snapshot %s is refused", (forged,), None)
    lines = OneLine("%(levelname)s %(name)s: %(message)s")
    shown = "x\\n2026-01-01 00:00:00,000 ERROR care: all is lost\\x1b[2J\\x85\\u2028"
    assert lines.format(record) == f"ERROR care: snapshot {shown} is refused"
    try:
        raise ValueError(forged)
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *others = lines.format(record).split("\n")
    assert first.endswith("is refused")
    assert others[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") and line.isprintable() for line in others)
    assert "all is lost\\x1b[2J" in "".join(others)
