"""`care`: the one command. Each subcommand lives in its own room and is imported only when it is called."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from models.errors import CareError

COMMANDS = {
    "demo": ("", "build the example corpus on the first call, then serve it: the quickest way to see a search"),
    "serve": ("service.command", "serve the published snapshot of a collection over HTTP"),
    "index": ("indexer.command", "build, publish, list, roll back and verify snapshots of a corpus"),
    "train": ("models.training.command", "train an encoder by a recipe (needs the train extra)"),
    "export": ("models.export.command", "turn a trained encoder into ONNX graphs (needs the train extra)"),
    "eval": ("models.evaluation.command", "judge encoders, BM25 and their hybrid on evaluation sets"),
}
DEMO_CORPUS = "examples/corpus.jsonl"
DEMO_COLLECTION = "var/demo"
TRAIN_EXTRA = {"torch", "transformers", "onnx", "safetensors", "onnxscript"}


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="care", description=_overview(), formatter_class=_Plain)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the above")
    name = parser.parse_args(given[:1]).command
    try:
        return _demo(given[1:]) if name == "demo" else _run(name, given[1:])
    except CareError as error:
        print(f"care {name}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAIN_EXTRA:
            raise
        print(f"care {name}: needs {error.name}, which the train extra brings (make install-train)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(name: str, given: list[str]) -> int:
    room = import_module(COMMANDS[name][0])
    parser = argparse.ArgumentParser(prog=f"care {name}", description=room.__doc__, formatter_class=_Plain)
    room.add_arguments(parser)
    room.run(parser.parse_args(given))
    return 0


def _demo(given: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="care demo", description=COMMANDS["demo"][1])
    parser.add_argument("--port", default="8000", help="port to listen on (%(default)s)")
    port = parser.parse_args(given).port
    if not Path(DEMO_COLLECTION, "CURRENT").is_file():
        print("Building the snapshot of the example corpus (once) …", flush=True)
        _run("index", ["build", DEMO_CORPUS, "--collection", DEMO_COLLECTION, "--publish"])
    return _run("serve", ["--collection", DEMO_COLLECTION, "--port", port])


class _Plain(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they were written."""


def _overview() -> str:
    lines = [f"  {name:8} {text}" for name, (_, text) in COMMANDS.items()]
    return "CARE Search: retrieval for RAG.\n\n" + "\n".join(lines) + "\n\ncare COMMAND --help says more about each."


if __name__ == "__main__":
    sys.exit(main())
