"""Bring an encoder of your own: import a published checkpoint or a server, inspect a folder, compare two.

care encoder import Qwen/Qwen3-Embedding-0.6B my-encoder      a hub id, a folder with a checkpoint, a .gguf file
care encoder import https://host/v1 my-encoder --model NAME   a server: vLLM, TEI, Infinity, Ollama, a cloud
care encoder import BASE my-encoder --adapter FOLDER          with an adapter that care train wrote
care encoder import BAAI/bge-reranker-base my-reranker        a cross-encoder: BERT or XLM-R with one label
care encoder show my-encoder                                  what it is, and what it can do
care encoder pair my-query-encoder my-encoder                 do they share an embedding space?
care encoder router my-query-encoder my-encoder both          the pair as one folder for sentence-transformers

An import works out pooling, prompts, dense layers, dimensions, length and tokenizer from what the checkpoint says of
itself, compares its vectors with those of sentence-transformers or transformers, and writes nothing if they differ.
Code that comes with a checkpoint is never run. Of a server it keeps the address, never the key, and vectors of a few
texts, the canaries, by which another model at the same address is noticed.
"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

from models.encoder.pairs import RerankerSpec, is_reranker
from models.encoder.spec import BESIDE, PACKED, POOLINGS, TOKENIZER_FILE, EncoderSpec, Pooling, Side, Variant
from models.errors import BadEncoder
from models.package import positive

SCHEMES = ("http://", "https://")
DTYPES = ("float32", "bfloat16", "float16")
OF_CHECKPOINTS = ("adapter", "beside", "dtype")


def add_arguments(parser: ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", required=True, metavar="import | show | pair | router")
    own = parts.add_parser("import", help="make an encoder folder of a published checkpoint")
    own.add_argument(
        "source",
        help="transformers or sentence-transformers folder, .gguf file, hub id, or https://host/v1 of a server",
    )
    own.add_argument("target", type=Path, help="the encoder folder to write")
    own.add_argument("--space", help="name of the embedding space (default: the checkpoint's name)")
    own.add_argument("--pooling", type=Pooling, choices=POOLINGS, help="default: what the checkpoint says")
    own.add_argument("--dim", type=positive, help="keep the first DIM dimensions (Matryoshka; default: all)")
    own.add_argument("--max-length", type=positive, help="tokens read of a text (default: at most 512)")
    own.add_argument("--dtype", choices=DTYPES, help="numbers of its weights (default: the checkpoint's)")
    own.add_argument(
        "--query-instruction", metavar="TEXT", help="put before queries (default: the checkpoint's prompt)"
    )
    own.add_argument("--document-instruction", metavar="TEXT", help="put before documents (default: likewise)")
    own.add_argument(
        "--adapter", type=Path, metavar="FOLDER", help="LoRA adapter trained from the checkpoint (care train writes it)"
    )
    own.add_argument(
        "--beside", metavar="SOURCE", help="second encoder, if two read the adapter's documents (or another --space)"
    )
    server = own.add_argument_group("a server with OpenAI's embeddings API")
    server.add_argument("--model", metavar="NAME", help="its name for the encoder")
    server.add_argument("--api-key-env", metavar="VARIABLE", help="environment variable that holds its key")
    server.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json that counts tokens where texts are cut (default: an estimate)"
    )
    added = "a JSON object added to requests for %s, such as " + """'{"input_type": "%s"}'"""
    server.add_argument("--query-fields", type=_fields, default={}, help=added % ("queries", "query"))
    server.add_argument("--document-fields", type=_fields, default={}, help=added % ("documents", "document"))
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


def _fields(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _import(arguments: Namespace) -> None:
    if arguments.source.startswith(SCHEMES):
        _import_address(arguments)
        return
    server_options = ("model", "api_key_env", "tokenizer", "query_fields", "document_fields")
    for name in (name for name in server_options if getattr(arguments, name)):
        flag = name.replace("_", "-")
        raise BadEncoder(f"--{flag} is for a server; {arguments.source} is not an address (https://host/v1)")
    from models.importing.checkpoint import import_encoder
    from models.importing.options import ImportOptions

    options = ImportOptions(**{field.name: getattr(arguments, field.name) for field in fields(ImportOptions)})
    print(f"reading {arguments.source} …", file=sys.stderr, flush=True)
    done = import_encoder(arguments.source, arguments.target, options)
    if not isinstance(done, list):
        print(
            f"{done.folder}: a reranker; {done.pairs} pairs differ from transformers' scores by at most "
            f"{done.difference:.6f} of their deviation; {done.parameters / 1e6:,.0f}M parameters, "
            f"{done.weight_bytes / 1e9:.2f} GB"
        )
        _describe_reranker(done.folder, done.spec)
        return
    for made in done:
        print(
            f"{made.folder}: cosine to {made.reference} {made.cosine:.6f} on average, {made.worst:.6f} at worst; "
            f"{made.parameters / 1e6:,.0f}M parameters, {made.weight_bytes / 1e9:.2f} GB; "
            f"{made.texts_per_second:.0f} check texts a second here in fp32"
        )
        if made.similarity:
            compared = f"the checkpoint compares vectors by {made.similarity}, with their lengths; here they are of "
            print(compared + "length 1 and compared by their cosine, so rankings differ: judge them (care eval)")
        if options.adapter and not options.beside and (adapter := EncoderSpec.load(options.adapter)).beside:
            print(f"without --beside: the first of two encoders alone; queries of {adapter.space} do not fit it")
        _describe(made.folder, made.spec)


def _import_address(arguments: Namespace) -> None:
    from models.importing.address import Server, import_address

    if arguments.pooling is not None:
        raise BadEncoder("--pooling: a server pools by itself; leave it out")
    if any(getattr(arguments, name) is not None for name in OF_CHECKPOINTS):
        named = ", ".join(f"--{name}" for name in OF_CHECKPOINTS)
        raise BadEncoder(f"{named}: they belong to a checkpoint that is here, not to a server; leave them out")
    if not arguments.model:
        raise BadEncoder(f"{arguments.source}: name the encoder with --model; {arguments.source}/models may list them")
    stated = {field.name: getattr(arguments, field.name, None) for field in fields(Server)}
    options = {name: value for name, value in stated.items() if value is not None}
    server = Server(url=arguments.source, key_variable=arguments.api_key_env, **options)
    worst = import_address(server, arguments.target)
    print(f"{arguments.target}: the canaries have a cosine of {worst:.6f} or more when they are asked for again")
    _describe(arguments.target, EncoderSpec.load(arguments.target))


def _show(arguments: Namespace) -> None:
    if is_reranker(arguments.folder):
        _describe_reranker(arguments.folder, RerankerSpec.load(arguments.folder))
        return
    spec = EncoderSpec.load(arguments.folder)
    _describe(arguments.folder, spec)
    if spec.address is not None:
        from models.encoder.address import AddressEncoder

        worst = AddressEncoder.load(arguments.folder).check()
        print(f"the server answers; the canaries have a cosine of {worst:.6f} or more")


def _describe(folder: Path, spec: EncoderSpec) -> None:
    name, made = (shlex.quote(text) for text in (str(folder), f"{folder}-served"))
    cut = f" of {spec.native_dim}" if spec.dim != spec.native_dim else ""
    print(
        f"{spec.architecture}, {spec.pooling} pooling, {spec.dim}{cut} dimensions, {spec.max_length} tokens, ", end=""
    )
    print(f"space {spec.space}, reads {' and '.join(spec.sides)}")
    for side in spec.sides:
        if spec.instruction(side):
            print(f"before a {side}: {spec.instruction(side)!r}")
    if spec.address is not None:
        print(f"run by {spec.address.url} as {spec.address.model}", end="")
        print(f", with the key in {spec.address.key_variable}" if spec.address.key_variable else ", without a key")
        counted = "its own tokenizer.json" if TOKENIZER_FILE in spec.checksums else "an estimate (--tokenizer: exactly)"
        print(f"tokens are counted by {counted}")
        print(f"index: care index build CORPUS --encoder {name}   serve queries: care serve --encoder {name}")
    graphs = [variant for variant in Variant if variant.filename in spec.checksums]
    # The folder of an adapter has no tokenizer: it is not an encoder yet.
    weights = TOKENIZER_FILE in spec.checksums and any(name.endswith(".safetensors") for name in spec.checksums)
    uses = {Side.DOCUMENT: "index", Side.QUERY: "serve queries"}
    tasks = [use for side, use in uses.items() if side in spec.sides]
    if spec.beside is not None:
        print(
            f"its vectors are joined with those of the encoder in {BESIDE}/, which has a share of {spec.beside.share:g}"
        )
        tasks = ["index"]  # no graph is made of two encoders
    if weights and spec.architecture in PACKED and Side.DOCUMENT in spec.sides:
        tasks.remove("index")
        print(f"index by torch: care index build CORPUS --encoder {name}   (bf16 or fp8 on a GPU, fp32 elsewhere)")
    if graphs:
        serves = Side.QUERY in spec.sides
        command = f"care serve --encoder {name}" if serves else f"care index build CORPUS --encoder {name}"
        print(f"{'index and serve' if serves else 'index'} by ONNX Runtime: {command}   ({', '.join(graphs)})")
    elif weights and tasks:
        print(f"to {' and '.join(tasks)}, make graphs first: care export {name} {made}")
    if spec.dim == spec.native_dim and weights and spec.beside is None:
        print("fewer dimensions (Matryoshka): --dim at import or export; only if the encoder was trained for it")


def _describe_reranker(folder: Path, spec: RerankerSpec) -> None:
    name, made = (shlex.quote(text) for text in (str(folder), f"{folder}-served"))
    print(f"reranker, {spec.architecture}, {spec.max_length} tokens a pair")
    graphs = [variant for variant in Variant if variant.filename in spec.checksums]
    if graphs:
        print(f"rerank what a search finds: CARE_RERANKER={name} care serve   ({', '.join(graphs)})")
    else:
        print(f"to rerank in the service, make graphs first: care export {name} {made}")
    print(f"judge it: care eval DATA --reranker {name}")


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
