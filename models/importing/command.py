"""Bring an encoder of your own: import a published checkpoint, look at a folder, compare two.

care encoder import Qwen/Qwen3-Embedding-0.6B my-encoder      a hub id, a folder with a checkpoint, a .gguf file
care encoder show my-encoder                                  what it is, and what it can do
care encoder pair my-query-encoder my-encoder                 do they share an embedding space?
care encoder router my-query-encoder my-encoder both          the pair as one folder for sentence-transformers

An import works out pooling, prompts, dense layers, dimensions, length and tokenizer from what the checkpoint says of
itself, compares its vectors with those of sentence-transformers or transformers, and writes nothing if they differ.
Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from models.encoder.spec import EncoderSpec, Pooling, Variant
from models.package import positive


def add_arguments(parser: ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="import | show | pair | router")
    own = parts.add_parser("import", help="make an encoder folder of a published checkpoint")
    own.add_argument("source", help="transformers or sentence-transformers folder, .gguf file, or hub id")
    own.add_argument("target", type=Path, help="the encoder folder to write")
    own.add_argument("--space", help="name of the embedding space (default: the checkpoint's name)")
    own.add_argument("--pooling", type=Pooling, choices=list(Pooling), help="default: what the checkpoint says")
    own.add_argument("--dim", type=positive, help="keep the first DIM dimensions (Matryoshka; default: all)")
    own.add_argument("--max-length", type=positive, help="tokens read of a text (default: at most 512)")
    own.add_argument(
        "--query-instruction", metavar="TEXT", help="put before queries (default: the checkpoint's prompt)"
    )
    own.add_argument("--document-instruction", metavar="TEXT", help="put before documents (default: likewise)")
    show = parts.add_parser("show", help="what a folder holds and can do")
    show.add_argument("folder", type=Path)
    pair = parts.add_parser("pair", help="whether two encoders share an embedding space")
    pair.add_argument("query", type=Path, help="the encoder that reads queries")
    pair.add_argument("document", type=Path, help="the encoder that reads documents")
    router = parts.add_parser("router", help="write a pair as one sentence-transformers folder")
    router.add_argument("query", type=Path, help="the encoder that reads queries, with torch weights")
    router.add_argument("document", type=Path, help="the encoder that reads documents, with torch weights")
    router.add_argument("target", type=Path, help="the folder to write")


def run(arguments: Namespace) -> None:
    {"import": _import, "show": _show, "pair": _pair, "router": _router}[arguments.part](arguments)


def _import(arguments: Namespace) -> None:
    from models.importing.checkpoint import Given, import_encoder

    given = Given(
        space=arguments.space,
        pooling=arguments.pooling,
        dim=arguments.dim,
        max_length=arguments.max_length,
        query_instruction=arguments.query_instruction,
        document_instruction=arguments.document_instruction,
    )
    print(f"reading {arguments.source} …", file=sys.stderr, flush=True)
    for made in import_encoder(arguments.source, arguments.target, given):
        print(
            f"{made.folder}: cosine to {made.reference} {made.cosine:.6f} on average, {made.worst:.6f} at worst; "
            f"{made.parameters / 1e6:,.0f}M parameters, {made.weight_bytes / 1e9:.2f} GB; "
            f"{made.texts_per_second:.0f} check texts a second here in fp32"
        )
        _describe(made.folder, made.spec)


def _show(arguments: Namespace) -> None:
    _describe(arguments.folder, EncoderSpec.load(arguments.folder))


def _describe(folder: Path, spec: EncoderSpec) -> None:
    cut = f" of {spec.native_dim}" if spec.dim != spec.native_dim else ""
    print(
        f"{spec.architecture}, {spec.pooling} pooling, {spec.dim}{cut} dimensions, {spec.max_length} tokens, ", end=""
    )
    print(f"space {spec.space}, reads {' and '.join(spec.sides)}")
    for side in spec.sides:
        if spec.instruction(side):
            print(f"before a {side}: {spec.instruction(side)!r}")
    graphs = [variant for variant in Variant if variant.filename in spec.checksums]
    weights = any(name.endswith(".safetensors") for name in spec.checksums)
    if weights:
        print(f"index by torch: care index build CORPUS --encoder {folder}   (bf16 or fp8 on a card, fp32 elsewhere)")
    if graphs:
        print(f"index and serve by ONNX Runtime: care serve --encoder {folder}   ({', '.join(graphs)})")
    elif weights:
        print(f"to serve queries, make graphs first: care export {folder} {folder}-served")
    if spec.dim == spec.native_dim and weights:
        print("fewer dimensions (Matryoshka): --dim at import or export; only if the encoder was trained for it")


def _pair(arguments: Namespace) -> None:
    from models.importing.pairs import compare

    found = compare(arguments.query, arguments.document)
    print(
        f"declared: {found.spaces[0]} and {found.spaces[1]}; "
        f"measured on {found.texts} texts: {found.matched:.0%} find themselves, cosine {found.same:.3f} to themselves, "
        f"{found.others:.3f} to others, closeness {found.closeness:.2f}"
    )
    print(found.verdict)
    if not found.shared:
        raise SystemExit(1)


def _router(arguments: Namespace) -> None:
    from models.importing.router import write_router

    worst = write_router(arguments.query, arguments.document, arguments.target)
    print(f"{arguments.target}: cosine to the pair's own vectors at least {worst:.6f}")
    print(f'SentenceTransformer("{arguments.target}").encode_query(…), .encode_document(…)')
