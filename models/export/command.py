"""Turn an encoder into ONNX graphs that serve without torch: fp32, fp16 for a GPU, int8 for a CPU.

care export var/runs/NAME/encoders/both my-encoder               what care train wrote
care export CHECKPOINT my-encoder --space NAME --pooling cls     a transformers folder; pooling if it names none
care index build corpus.jsonl --publish --encoder my-encoder     then care serve --encoder my-encoder
care export var/runs/NAME/encoders/reranker my-reranker          a reranker; then CARE_RERANKER=my-reranker care serve

Every graph is compared with the source on the check texts; below its floor, nothing is written. Encoders share a
--space only if they were trained to: the vectors of one are then searched among those of the other.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from models.encoder.spec import POOLINGS, Pooling, Variant
from models.errors import ExportError
from models.export.folders import check_source, check_target
from models.package import positive


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="encoder folder, transformers folder, or a folder Optimum exported")
    parser.add_argument("target", type=Path, help="the encoder folder to write")
    parser.add_argument("--space", help="name of the embedding space (default: the source's own)")
    parser.add_argument("--pooling", type=Pooling, choices=POOLINGS, help="default: what the source says")
    parser.add_argument("--dim", type=positive, help="keep the first DIM dimensions (default: all)")
    tokens = "tokens read of a text (default: 512 or what the source says)"
    parser.add_argument("--max-length", type=positive, help=tokens)
    every = list(Variant)
    which = "which graphs (default: all three)"
    parser.add_argument("--variants", type=Variant, choices=every, nargs="+", default=every, help=which)
    backends, by = ("auto", "torch", "optimum"), "the exporter (default: Optimum if it is installed)"
    parser.add_argument("--backend", choices=backends, default="auto", help=by)
    parser.add_argument("--optimum-python", type=Path, help="interpreter of the Optimum environment")


def run(arguments: Namespace) -> None:
    """Exports and prints one line a graph."""
    from models.encoder.pairs import is_reranker

    check_target(arguments.source, arguments.target)
    check_source(arguments.source)
    if is_reranker(arguments.source):
        _run_reranker(arguments)
        return
    from models.export.pipeline import Backend, export

    names = ("space", "pooling", "dim", "max_length", "variants", "optimum_python")
    options = {name: getattr(arguments, name) for name in names}
    report = export(arguments.source, arguments.target, backend=Backend(arguments.backend), **options)
    for graph in report.graphs:
        print(
            f"{graph.variant.filename:16} {graph.size_bytes / 1e6:8.1f} MB   cosine {graph.parity.cosine:.5f}   "
            f"top-10 overlap {graph.parity.top10_overlap:.3f}   by {graph.made_by}"
        )
    print(f"{report.folder}: {report.spec.architecture}, {report.spec.dim} dimensions, space {report.spec.space}")


def _run_reranker(arguments: Namespace) -> None:
    from models.export.reranker import export_reranker

    for name in ("space", "pooling", "dim", "optimum_python"):
        if getattr(arguments, name) is not None:
            raise ExportError(f"--{name.replace('_', '-')}: {arguments.source} is a reranker; leave it out")
    report = export_reranker(
        arguments.source, arguments.target, max_length=arguments.max_length, variants=arguments.variants
    )
    for graph in report.graphs:
        size, parity = graph.size_bytes / 1e6, graph.parity
        print(
            f"{graph.variant.filename:16} {size:8.1f} MB   correlation {parity.correlation:.5f}   "
            f"largest difference {parity.difference:.4f} of the scores' deviation"
        )
    print(f"{report.folder}: reranker, {report.spec.architecture}, {report.spec.max_length} tokens a pair")
