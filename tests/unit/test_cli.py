"""`care`: every failure gives one line with the next step, and exit code 1."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import cli
from indexer.store.collection import Collection
from indexer.versions import is_encoded_by
from models.encoder.spec import EncoderSpec
from models.errors import CareError
from models.package import BUNDLED_PAIR, care_version

pytestmark = pytest.mark.usefixtures("keep_signals")

CORPUS = Path("examples/corpus.jsonl")


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the one line of a call that fails."""
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    output = capsys.readouterr()
    assert code == 1
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "care: the following arguments are required: COMMAND; care --help says more"),
        (("nonsense",), "care: argument COMMAND: invalid choice"),
        (("index",), "care index: the following arguments are required"),
        (("index", "build"), "care index build: the following arguments are required: corpus"),
        (("index", "build", "x", "--threads", "-1"), "'-1' is not a whole number above 0"),
        (("index", "build", "x", "--passage-tokens", "0"), "'0' is not a whole number above 0"),
        (("demo", "--port", "abc"), "invalid int value: 'abc'"),
        (("export", "a", "b", "--variants", "int3"), "'int3' is not one of fp32, fp16, int8"),
        (("index", "build", "a", "--precision", "fp4"), "'fp4' is not one of "),
        (("eval", "a", "--fusion", "sum"), "'sum' is not one of "),
    ],
)
def test_wrong_arguments_give_a_one_line_error(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in failure(capsys, *arguments)


@pytest.mark.parametrize("command", ["index", "serve"])
def test_a_misspelt_variable_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARE_COLECTION", "var/mine")
    monkeypatch.setenv("CARE_OPTIMUM_PYTHON", "python3")  # neither a setting nor a misspelt one
    message = failure(capsys, command, *(["list"] if command == "index" else []))
    nearest = "CARE_COLECTION: there is no such setting; did you mean CARE_COLLECTION?"
    assert message == f"care {command}: {nearest} (docs/settings.md)"


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert allowed == (cli.OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, cli.OPEN_FILES))


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"care-search {care_version()}\n")


def test_a_collection_that_cannot_be_written_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    message = failure(capsys, "index", "build", str(CORPUS), "--collection", str(tmp_path / "file"))
    assert str(tmp_path / "file") in message
    assert "Not a directory" in message


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_a_command_without_a_message(unbuffered: str) -> None:
    """As in `care index diff | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys, cli; cli._run = lambda *_: print('x' * 100_000) or 0; sys.exit(cli.main(['index']))"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, env=environment, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_an_encoding_without_a_character_ends_no_command() -> None:
    code = "import sys, cli; cli._run = lambda *_: print('→') or 0; sys.exit(cli.main(['index']))"
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True).stdout
    assert said == b"\\u2192\n"


def test_an_error_of_several_lines_becomes_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str, given: list[str]) -> int:
        raise CareError("first\n  second")

    monkeypatch.setattr(cli, "_run", broken)
    assert failure(capsys, "eval", "x") == "care eval: first second"


def test_a_full_disk_reported_by_a_library_gives_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str, given: list[str]) -> int:
        raise RuntimeError(given[0])

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["encoder", "Error while serializing: No space left on device (os error 28)"]) == 1
    assert capsys.readouterr().err == (
        "care encoder: No space left on device; free some space, then run the same command again\n"
    )
    with pytest.raises(RuntimeError, match="another"):
        cli.main(["encoder", "another"])


def test_a_missing_library_of_an_extra_is_named_and_any_other_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking(name: str, given: list[str]) -> int:
        raise ModuleNotFoundError(f"No module named {given[0]!r}", name=given[0])

    monkeypatch.setattr(cli, "_run", lacking)
    message = failure(capsys, "export", "torch.nn")
    assert message == "care export: needs torch.nn, which the train extra brings (make install-train)"
    assert "which the mcp extra brings (pip install 'care-search[mcp]')" in failure(capsys, "mcp", "mcp.server")
    with pytest.raises(ModuleNotFoundError):
        cli.main(["export", "numpy"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_build_reports_it_and_leaves_nothing_behind(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(name: str, given: list[str]) -> int:
        with Collection(tmp_path).building("1"):
            signal.raise_signal(number)
        return 0

    monkeypatch.setattr(cli, "_run", stopped)
    # A shell starts what runs in its background with Ctrl-C ignored, these tests as well.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert cli.main(["index", "build"]) == 128 + number
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGHUP, hangup)
    assert capsys.readouterr().err == f"care index: stopped by {number.name}; run the same command again to go on\n"
    assert list((tmp_path / "versions").iterdir()) == []


def test_a_second_signal_does_not_stop_the_cleaning_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`timeout` signals the command, then its whole process group."""

    def stopped(name: str, given: list[str]) -> int:
        with Collection(tmp_path).building("1"):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                print("cleaned up")
        return 0

    monkeypatch.setattr(cli, "_run", stopped)
    assert cli.main(["index", "build"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().out == "cleaned up\n"
    assert list((tmp_path / "versions").iterdir()) == []


@pytest.mark.parametrize(
    ("command", "given", "during"),
    [
        ("serve", signal.SIG_DFL, signal.SIG_IGN),
        ("index", signal.SIG_DFL, cli._terminate),
        ("index", signal.SIG_IGN, signal.SIG_IGN),  # by nohup
    ],
)
def test_a_reload_during_the_start_does_not_end_the_service(
    command: str, given: signal.Handlers, during: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    monkeypatch.setattr(cli, "_run", lambda *given: found.append(signal.getsignal(signal.SIGHUP)) or 0)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    before = signal.signal(signal.SIGHUP, given)
    try:
        assert cli.main([command]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == [during]


def test_the_demo_is_built_again_for_another_encoder(tmp_path: Path) -> None:
    corpus, encoder = tmp_path / "corpus.jsonl", Path("models/pretrained/care-small-zh")
    corpus.write_text(json.dumps({"_id": "1", "text": "高血压"}), encoding="utf-8")
    collection = tmp_path / "collection"
    assert not is_encoded_by(Collection(collection), encoder)
    assert cli.main(["index", "build", str(corpus), "--collection", str(collection), "--publish"]) == 0
    assert is_encoded_by(Collection(collection), encoder)
    newer = tmp_path / "newer"
    newer.mkdir()
    spec = json.loads((encoder / "encoder.json").read_text(encoding="utf-8"))
    spec["checksums"]["model.int8.onnx"] = "another"
    (newer / "encoder.json").write_text(json.dumps(spec), encoding="utf-8")
    assert not is_encoded_by(Collection(collection), newer)
    Path(collection, "CURRENT").write_text("gone", encoding="utf-8")
    assert not is_encoded_by(Collection(collection), encoder)


@pytest.mark.parametrize("own", ["", "mine"])
def test_the_demo_makes_a_token_and_prints_it_unless_there_is_one(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens: list[str] = []
    monkeypatch.setattr(cli, "DEMO_COLLECTION", str(tmp_path))
    monkeypatch.setenv("CARE_ENCODER", "my-encoder")
    monkeypatch.setenv("CARE_ADMIN_TOKEN", own)
    monkeypatch.setattr(cli, "_demo_is_built", lambda: True)
    monkeypatch.setattr(cli, "_run", lambda name, given: tokens.append(os.environ["CARE_ADMIN_TOKEN"]) or 0)
    assert cli.main(["demo"]) == 0
    printed = capsys.readouterr().out
    if own:
        assert (tokens, printed) == ([own], "")
    else:
        assert len(tokens[0]) >= 20
        assert f"export CARE_ADMIN_TOKEN={tokens[0]}\n" in printed


def test_the_demo_serves_the_bundled_pair_without_its_document_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Path] = []
    monkeypatch.setattr(cli, "DEMO_COLLECTION", str(tmp_path / "demo"))
    monkeypatch.setenv("CARE_ENCODER", "")
    monkeypatch.setattr(cli, "_run", lambda name, given: served.append(Path(given[1])) or 0)
    assert cli.main(["demo"]) == 0
    assert Path(os.environ["CARE_ENCODER"]) == BUNDLED_PAIR
    manifest = Collection(served[0]).served_manifest()
    assert manifest is not None
    assert manifest.encoder.fingerprint not in EncoderSpec.load(BUNDLED_PAIR).fingerprints
    manifest.require_encoder(EncoderSpec.load(BUNDLED_PAIR))
    (served[0] / "mark").touch()
    monkeypatch.setenv("CARE_ENCODER", "")
    assert cli.main(["demo"]) == 0
    assert served[0] == served[1]
    assert (served[0] / "mark").is_file(), "restored once"


def test_two_demos_that_start_together_restore_one_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "DEMO_COLLECTION", str(tmp_path / "var" / "demo"))
    monkeypatch.setenv("CARE_ENCODER", "")
    with ThreadPoolExecutor(4) as pool:
        (served,) = {future.result() for future in [pool.submit(cli._restored_demo) for _ in range(4)]}
    assert Collection(Path(served)).served_manifest() is not None
