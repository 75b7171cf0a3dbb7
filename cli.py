"""The `care` command: parses the subcommand and imports its module only when it is called."""

from __future__ import annotations

import argparse
import errno
import io
import os
import resource
import secrets
import select
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from models.errors import CareError
from models.package import care_version

COMMANDS = {
    "demo": ("", "serve the example corpus: the quickest way to see a search"),
    "serve": ("service.command", "serve the published snapshot of a collection over HTTP"),
    "keys": ("service.keys", "create, list and revoke the API keys of a service"),
    "index": ("indexer.command", "build, check, publish, compare and roll back snapshots of a corpus"),
    "backup": ("indexer.backup", "write snapshots, posted documents and keys into one file"),
    "restore": ("indexer.restore", "put a backup into an empty collection folder and check it"),
    "curate": ("models.curation.command", "make training rows and benchmarks: clean, mine, write, judge"),
    "train": ("models.training.command", "train encoders by a recipe, stage by stage (needs the train extra)"),
    "export": ("models.export.command", "turn a trained encoder into ONNX graphs (needs the train extra)"),
    "encoder": (
        "models.importing.command",
        "import published encoders, look at them, compare two (import: train extra)",
    ),
    "mcp": ("care_client.mcp", "give agents a running service as tools (needs the mcp extra)"),
    "eval": ("models.evaluation.command", "judge encoders, BM25 and their hybrid on evaluation sets"),
}
# Subcommands of a subcommand that takes other arguments, too.
PARTS = {("eval", "diff"): "models.evaluation.diff"}
SERVING = ("demo", "serve")
DEMO_COLLECTION, PAGE = "var/demo", "page.json"
TOKEN_VARIABLE = "CARE_ADMIN_TOKEN"
OPEN_FILES = 65_536
STANDARD_OUTPUT = 1
# The demo does not use a configured vector database.
OWN_INDEX = ("--vectors", "faiss")
TRAIN_EXTRA = {
    "torch", "transformers", "onnx", "safetensors", "onnxscript", "peft", "accelerate", "gguf", "ranx",
    "sentence_transformers",
}  # fmt: skip
EXTRAS = {
    **dict.fromkeys(TRAIN_EXTRA, "train"),
    "datasketch": "curate",
    "pyarrow": "parquet",
    "mcp": "mcp",
    "mcp_types": "mcp",
}


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    _raise_file_limit()
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread:
        # An exception, so that a stopped build removes what it has half written.
        signal.signal(signal.SIGTERM, _terminate)
    parser = _Parser(prog="care", description=_overview(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"care-search {care_version()}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the above")
    name = parser.parse_args(words[:1]).command
    has_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_main_thread and name in SERVING and not has_terminal:
        # A reload that is asked for while the libraries are loaded must not end the service.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    elif is_main_thread and name not in SERVING and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _terminate)  # a terminal that was closed; under nohup it is ignored
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another encoding must not end a long run
    try:
        code = _demo(words[1:]) if name == "demo" else _run(name, words[1:])
        print(end="", flush=True)  # here, and not when Python ends, which would report a failure in its own words
        return code
    except CareError as error:
        _fail(name, str(error))
        return error.exit_code
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_left():  # care index diff | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_OUTPUT)
            return 128 + signal.SIGPIPE
        # A full disk or a folder without permission: the caller can fix it.
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return _fail(name, f"{where}{error.strerror}; free some space, then run the same command again")
        return _fail(name, f"{where}{error.strerror or error}; give a path that can be read and written")
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        how = "pip install 'care-search[mcp]'" if extra == "mcp" else "make install-train"
        return _fail(name, f"needs {error.name}, which the {extra} extra brings ({how})")
    except (_Terminated, KeyboardInterrupt) as stop:
        number = stop.number if isinstance(stop, _Terminated) else signal.SIGINT
        _fail(name, f"stopped by {number.name}; run the same command again to go on")
        return 128 + number
    except Exception as error:
        if os.strerror(errno.ENOSPC) not in str(error):  # as libraries in other languages report it
            raise
        return _fail(name, f"{os.strerror(errno.ENOSPC)}; free some space, then run the same command again")


def _raise_file_limit() -> None:
    """Raises the limit of open files: metadata columns and connections need more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _reader_left() -> bool:
    """Returns whether standard output is a pipe that nothing reads any more."""
    output = select.poll()
    output.register(STANDARD_OUTPUT, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


class _Terminated(BaseException):
    """Raised on SIGTERM and SIGHUP; unwinds the command, as KeyboardInterrupt does."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number


def _terminate(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: the second must not stop the cleaning up
    raise _Terminated(signal.Signals(number))


def _fail(name: str, message: str) -> int:
    """Prints the message in one line."""
    print(f"care {name}: {' '.join(message.split())}", file=sys.stderr)
    return 1


def _run(name: str, words: list[str]) -> int:
    part = PARTS.get((name, words[0])) if words else None
    if part is not None:
        name, words = f"{name} {words[0]}", words[1:]
    command = import_module(part or COMMANDS[name][0])
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog=f"care {name}", description=command.__doc__, formatter_class=form)
    command.add_arguments(parser)
    arguments = parser.parse_args(words)
    if name == "index":  # reads a few settings of the service, and must not miss one that is misspelt
        from service.command import require_known_variables

        require_known_variables()
    command.run(arguments)
    return 0


def _demo(words: list[str]) -> int:
    parser = _Parser(prog="care demo", description=COMMANDS["demo"][1])
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    port = parser.parse_args(words).port
    if not 0 <= port <= 65535:
        parser.error(f"argument --port: {port} is not between 0 and 65535")
    from indexer.command import served_encoder

    collection = _built_demo() if served_encoder() else _restored_demo()
    if not os.environ.get(TOKEN_VARIABLE):
        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(16)
        print(f"Adding documents takes this token: export {TOKEN_VARIABLE}={os.environ[TOKEN_VARIABLE]}", flush=True)
    return _run("serve", ["--collection", collection, "--port", str(port), *OWN_INDEX])


def _restored_demo() -> str:
    """Restores the example corpus as the pair's document encoder, which is not bundled, read it; sets CARE_ENCODER."""
    from indexer.command import EXAMPLE_CORPUS
    from indexer.restore import restore_backup
    from indexer.store.files import in_turn
    from models.encoder.spec import sha256_of
    from models.package import BUNDLED_PAIR

    backup = EXAMPLE_CORPUS.with_name("pair.tar")
    # Named by its content: after an upgrade that brings other vectors, the new ones are served.
    collection = f"{DEMO_COLLECTION}-{sha256_of(backup)[:8]}"
    Path(collection).parent.mkdir(parents=True, exist_ok=True)
    with in_turn(Path(f"{collection}.lock")):
        if not Path(collection, PAGE).is_file():
            shutil.rmtree(collection, ignore_errors=True)
            restore_backup(backup, Path(collection))
            shutil.copy(EXAMPLE_CORPUS.with_name(PAGE), collection)
    os.environ["CARE_ENCODER"] = str(BUNDLED_PAIR)
    return collection


def _built_demo() -> str:
    """Builds the example corpus with the encoder of CARE_ENCODER, again after a change of the encoder."""
    from indexer.command import EXAMPLE_CORPUS

    if not _demo_is_built():
        print("Building the snapshot of the example corpus (once) …", flush=True)
        _run("index", ["build", str(EXAMPLE_CORPUS), "--collection", DEMO_COLLECTION, *OWN_INDEX])
        # By force: the demo's encoder and collection change together.
        _run("index", ["publish", "--force", "--collection", DEMO_COLLECTION, *OWN_INDEX])
        shutil.copy(EXAMPLE_CORPUS.with_name(PAGE), DEMO_COLLECTION)
    return DEMO_COLLECTION


def _demo_is_built() -> bool:
    if not all(Path(DEMO_COLLECTION, name).is_file() for name in ("CURRENT", PAGE)):
        return False
    from indexer.store.collection import Collection
    from indexer.versions import is_encoded_by

    return is_encoded_by(Collection(Path(DEMO_COLLECTION)), Path(os.environ["CARE_ENCODER"]))


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line; sub-parsers are of this class too."""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:  # noqa: ANN401 (as in argparse)
        """Names the choices if a value is not among them: argparse names the Python type."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if action.choices is None:
                raise
            known = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"{arg_string!r} is not one of {known}") from error

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {' '.join(message.split())}; {self.prog} --help says more\n")


def _overview() -> str:
    lines = [f"  {name:8} {text}" for name, (_, text) in COMMANDS.items()]
    return "CARE Search: retrieval for RAG.\n\n" + "\n".join(lines) + "\n\ncare COMMAND --help says more about each."


if __name__ == "__main__":
    sys.exit(main())
