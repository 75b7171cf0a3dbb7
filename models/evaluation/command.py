"""Judge encoders, BM25 and their hybrid on every set below a folder, and print one table.

care eval examples
care eval DATA --encoder models/pretrained/care-small-zh --encoder /path/to/another --json figures.json
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from models.errors import CareError
from models.evaluation.judge import Figure, judge_all, table
from models.evaluation.systems import Dense, Encoder, Hybrid, Lexical, System
from models.fusion import Fusion
from models.onnx_encoder import OnnxEncoder
from models.spec import Variant

ENCODER = Path("models/pretrained/care-small-zh")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("data", type=Path, help="folder with evaluation sets (BEIR folders, rerank/, sts/)")
    parser.add_argument("--encoder", type=Path, action="append", help=f"encoder folder, repeatable ({ENCODER})")
    parser.add_argument("--variant", type=Variant, choices=list(Variant), help="which graph (default: the CPU's best)")
    parser.add_argument("--fusion", type=Fusion, choices=list(Fusion), default=Fusion.SCORES, help="(%(default)s)")
    parser.add_argument("--weight", type=float, help="the dense side's share in score fusion (default: by query)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def run(arguments: Namespace) -> None:
    if arguments.weight is not None and not 0 <= arguments.weight <= 1:
        raise CareError("--weight must be between 0 and 1")
    if arguments.json and not arguments.json.parent.is_dir():
        raise CareError(f"--json {arguments.json}: there is no folder {arguments.json.parent}")
    began = time.monotonic()
    encoders: dict[str, Encoder] = {}
    lexical = Lexical()
    systems: dict[str, System] = {"BM25": lexical}
    for folder in arguments.encoder or [ENCODER]:
        encoder = OnnxEncoder.load(folder, arguments.variant)
        name = f"{folder.name} ({encoder.variant})"
        dense = Dense(encoder)
        encoders[name] = encoder
        systems[name] = dense
        systems[f"hybrid {folder.name}"] = Hybrid(dense, lexical, arguments.fusion, arguments.weight)
    figures = judge_all(arguments.data, systems, encoders, _progress)
    print(table(figures))
    print(f"\n{time.monotonic() - began:.0f} s", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1), encoding="utf-8")


def _progress(figure: Figure) -> None:
    print(f"{figure.set_name:12} {figure.metric:8} {figure.system:32} {figure.value:6.2f}", file=sys.stderr, flush=True)
