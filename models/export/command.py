"""`care export`: the arguments and the run. Loads torch only when it runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from models.arguments import positive
from models.spec import Pooling, Variant


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="encoder folder, transformers folder, or a folder Optimum exported")
    parser.add_argument("target", type=Path, help="the encoder folder to write")
    parser.add_argument("--space", help="name of the embedding space (default: the source's own)")
    parser.add_argument("--pooling", type=Pooling, choices=list(Pooling), help="default: what the source says")
    parser.add_argument("--dim", type=positive, help="keep the first DIM dimensions (default: all)")
    parser.add_argument(
        "--max-length", type=positive, help="tokens read of a text (default: 512 or what the source says)"
    )
    parser.add_argument(
        "--variants", type=Variant, choices=list(Variant), nargs="+", default=list(Variant), help="default: all three"
    )
    parser.add_argument("--backend", choices=("auto", "torch", "optimum"), default="auto", help="who exports the graph")
    parser.add_argument("--optimum-python", type=Path, help="interpreter of the Optimum environment")


def run(arguments: Namespace) -> None:
    """Exports and prints one line a graph."""
    from models.export.pipeline import Backend, export

    report = export(
        arguments.source,
        arguments.target,
        space=arguments.space,
        pooling=arguments.pooling,
        dim=arguments.dim,
        max_length=arguments.max_length,
        variants=arguments.variants,
        backend=Backend(arguments.backend),
        optimum_python=arguments.optimum_python,
    )
    for graph in report.graphs:
        print(
            f"{graph.variant.filename:16} {graph.size_bytes / 1e6:8.1f} MB   cosine {graph.parity.cosine:.5f}   "
            f"top-10 overlap {graph.parity.top10_overlap:.3f}   by {graph.made_by}"
        )
    print(f"{report.folder}: {report.spec.architecture}, {report.spec.dim} dimensions, space {report.spec.space}")
