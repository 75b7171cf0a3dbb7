"""The reports of a run: the line, the metrics and the webhook; a failing report does not fail the run."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from indexer import report
from indexer.report import Outcome, call_webhook, summary_line, write_metrics
from tests.unit.indexer.support import RUN

FAILED = Outcome("no documents", 1.0)


def metrics(path: Path) -> dict[str, float]:
    families = text_string_to_metric_families(path.read_text())
    samples = [sample for family in families for sample in family.samples]
    return {"/".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def test_the_summary_line_has_counts_recall_and_times() -> None:
    assert summary_line(RUN.summary, published=True, removed=1, seconds=12.34) == (
        "published 20261115T041500123Z-1a2b3c4d: 400 documents (12 added, 5 changed, 2 removed), "
        "426 passages (20 encoded, 406 reused), hnsw index with recall 0.998, "
        "3 bad rows set aside in rejects/x.jsonl, old versions removed: 1, 12.3 s (read 0.2, encode 11.0)"
    )
    assert summary_line(RUN.summary, published=False, removed=0, seconds=1).startswith("built 2026")


def test_metrics_of_a_successful_run_are_written(tmp_path: Path) -> None:
    write_metrics(tmp_path / "care.prom", RUN, 1000.0, 900.0)
    assert metrics(tmp_path / "care.prom") == {
        "care_index_run_success": 1,
        "care_index_run_end_timestamp_seconds": 1000,
        "care_index_run_seconds": 12.3,
        "care_index_published_timestamp_seconds": 900,
        "care_index_documents": 400,
        "care_index_passages": 426,
        "care_index_rejects": 3,
        "care_index_encoded_passages": 20,
        "care_index_reused_passages": 406,
        "care_index_changed_documents/added": 12,
        "care_index_changed_documents/changed": 5,
        "care_index_changed_documents/removed": 2,
        "care_index_stage_seconds/read": 0.25,
        "care_index_stage_seconds/encode": 11,
        "care_index_recall": 0.9984,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["care.prom"]


def test_a_failure_replaces_the_metrics_of_a_success(tmp_path: Path) -> None:
    write_metrics(tmp_path / "care.prom", RUN, 1000.0, 900.0)
    write_metrics(tmp_path / "care.prom", FAILED, 2000.0, None)
    assert metrics(tmp_path / "care.prom") == {
        "care_index_run_success": 0,
        "care_index_run_end_timestamp_seconds": 2000,
        "care_index_run_seconds": 1,
    }


def test_metrics_that_cannot_be_written_give_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path / "nowhere" / "care.prom", RUN, 0.0, None)
    assert "care index: the metrics could not be written to" in capsys.readouterr().err


def test_metrics_take_the_place_of_no_device_and_of_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, link, real = tmp_path / "pipe", tmp_path / "link.prom", tmp_path / "care.prom"
    os.mkfifo(pipe)
    link.symlink_to(real)
    write_metrics(pipe, RUN, 0.0, None)
    assert f"not written to {pipe}, which is not a file" in capsys.readouterr().err
    assert pipe.is_fifo()
    write_metrics(link, FAILED, 0.0, None)
    assert link.is_symlink()
    assert metrics(real)["care_index_run_success"] == 0


class Listener(http.server.ThreadingHTTPServer):
    """A webhook receiver: records what came, and answers with `status`, or sends `greeting` first if it is set.

    It ends no answer until `going` is set; meanwhile it sends `drip` now and then.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        self.greeting = self.drip = b""
        self.going = threading.Event()
        self.going.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Listener

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.headers["Content-Type"], json.loads(body)))
        self.wfile.write(self.server.greeting)
        if not self.server.going.is_set():
            self.wfile.write(b"HTTP/1.0 200 OK\r\n")
        while not self.server.going.wait(0.1):
            self.wfile.write(self.server.drip)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes proxies from the environment, which would be used for this machine."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.going.set()
        for teller in threading.enumerate():
            if teller.name == "webhook":
                teller.join(30)
        server.shutdown()
        thread.join()


def test_the_webhook_gets_the_result(listener: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    call_webhook(listener.url, Outcome("published it", 12.34, RUN.summary, published=True))
    call_webhook(listener.url, RUN)
    call_webhook(listener.url, FAILED)
    expected = {"status": "published", "version": RUN.summary.version, "seconds": 12.3, "text": "published it"}
    assert listener.got[0] == ("application/json", expected)
    assert [fields["status"] for _, fields in listener.got] == ["published", "built", "failed"]
    assert listener.got[2][1]["version"] is None
    assert capsys.readouterr().err == ""


def test_a_refusing_webhook_gives_a_warning(listener: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    listener.status = 500
    call_webhook(listener.url, RUN)
    assert "the webhook failed (HTTP Error 500" in capsys.readouterr().err


@pytest.mark.parametrize("drip", [b"", b"X-More: 1\r\n"])
def test_a_webhook_that_does_not_end_its_answer_gives_a_warning(
    listener: Listener, drip: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "WEBHOOK_TIMEOUT_SECONDS", 0.5)
    listener.drip = drip
    listener.going.clear()
    call_webhook(listener.url, RUN)
    assert "the webhook has not answered within 0.5 s" in capsys.readouterr().err


def test_a_webhook_that_is_not_http_gives_a_warning(listener: Listener, capsys: pytest.CaptureFixture[str]) -> None:
    listener.greeting = b"220 mail.example ESMTP\r\n"
    call_webhook(listener.url, RUN)
    assert "the webhook failed (220 mail.example ESMTP" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://[::1/hook", "http://a b/hook", "http://127.0.0.1:99999/hook"])
def test_an_invalid_webhook_address_gives_a_warning(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    call_webhook(url, RUN)
    assert "the webhook failed" in capsys.readouterr().err


def test_an_unreachable_webhook_gives_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    call_webhook("http://127.0.0.1:1/hook", RUN)
    assert "the webhook failed" in capsys.readouterr().err
