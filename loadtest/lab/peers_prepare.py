"""Prepares what `make bench-peers` needs, once: weights, corpus, snapshot, and txtai's index.

All contestants get the same weights and the same document vectors. Texts are cut to a length that every encoder reads
whole: one document is one passage and one vector.
"""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from safetensors.torch import load_file, save_file

from loadtest.answers import read_queries
from loadtest.harness import REPOSITORY, BenchError
from loadtest.harness.report import say
from loadtest.harness.servers import care, run_command

TXTAI = REPOSITORY / ".venv-peers-txtai" / "bin" / "python"
INFINITY = REPOSITORY / ".venv-peers-infinity" / "bin" / "python"
# A Chinese character is at most one token; with the two special ones this stays below the encoder's 512.
TEXT_CHARACTERS = 500
# A question, not a case history: the sets also hold whole abstracts as queries.
QUERY_CHARACTERS = 64
SPACE = "peers"
VECTORS = "vectors.npy"
INDEX = "index.faiss"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Complete folders and files. `ids` names the document of each row of `vectors` and `index`."""

    queries: list[str]
    encoders: dict[str, Path]
    collection: Path
    weights: Path
    vectors: Path
    index: Path
    ids: Path
    txtai: Path


def prepare(data: Path, weights: Path, folder: Path, documents: int | None = None) -> Prepared:
    """Makes what the contestants need out of the first `documents` of a corpus, or all.

    `data` has corpus.jsonl.gz and */queries.jsonl, `weights` is a transformers folder of a BERT with CLS pooling.
    """
    _remember(folder, {"data": str(data.resolve()), "weights": str(weights.resolve()), "documents": documents})
    queries = _read_queries(data)
    peers_weights = folder / "weights"
    if not peers_weights.exists():
        _write_weights(weights, peers_weights)
    encoders = {variant: folder / f"encoder-{variant}" for variant in ("int8", "fp32")}
    for variant, encoder in encoders.items():
        if not encoder.exists():
            care("export", weights, encoder, "--space", SPACE, "--pooling", "cls", "--variants", variant)
    corpus, ids = folder / "corpus.jsonl", folder / "ids.json"
    if not ids.exists():
        _write_corpus(data / "corpus.jsonl.gz", corpus, ids, documents)
    collection = folder / "collection"
    if not (collection / "CURRENT").exists():
        say("bench-peers: encoding the corpus (once; minutes)")
        options = ("--encoder", encoders["int8"], "--collection", collection, "--index", "hnsw", "--publish")
        care("index", "build", corpus, *options)
    snapshot = collection / "versions" / (collection / "CURRENT").read_text(encoding="utf-8").strip()
    txtai = folder / "txtai"
    if not txtai.exists():
        say("bench-peers: building txtai's index")
        arguments = (snapshot / VECTORS, ids, peers_weights, folder / "txtai-building")
        run_command(TXTAI, "-m", "loadtest.lab.peers_programs", "txtai", *arguments)
        (folder / "txtai-building").rename(txtai)
    return Prepared(queries, encoders, collection, peers_weights, snapshot / VECTORS, snapshot / INDEX, ids, txtai)


def _remember(folder: Path, sources: dict[str, object]) -> None:
    """Refuses a folder that was prepared from something else."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "sources.json"
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != sources:
        raise BenchError(f"{folder} was prepared from other data or weights; remove it or give another --folder")
    file.write_text(json.dumps(sources, indent=1) + "\n", encoding="utf-8")


def _read_queries(data: Path) -> list[str]:
    texts = (text for file in sorted(data.glob("*/queries.jsonl")) for text in read_queries(file))
    queries = [text for text in texts if len(text) <= QUERY_CHARACTERS]
    if not queries:
        raise BenchError(
            f"{data}/*/queries.jsonl: no query of at most {QUERY_CHARACTERS} characters; give another DATA"
        )
    return queries


def _write_corpus(source: Path, corpus: Path, ids: Path, documents: int | None) -> None:
    names = []
    with gzip.open(source, "rt", encoding="utf-8") as rows, corpus.open("w", encoding="utf-8") as written:
        for line in islice(rows, documents):
            row = json.loads(line)
            names.append(row["_id"])
            text = f"{row['title']}{row['text']}"[:TEXT_CHARACTERS]
            written.write(json.dumps({"_id": row["_id"], "text": text}, ensure_ascii=False) + "\n")
    ids.write_text(json.dumps(names), encoding="utf-8")


def _write_weights(source: Path, target: Path) -> None:
    """Writes the weights in fp32 with the pooling configuration of sentence-transformers (Infinity) and txtai."""
    building = target.with_name("weights-building")
    shutil.rmtree(building, ignore_errors=True)
    (building / "1_Pooling").mkdir(parents=True)
    for file in source.glob("tokenizer*.json"):
        shutil.copyfile(file, building / file.name)
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, building / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    written = {
        "config.json": config | {"dtype": "float32", "torch_dtype": "float32"},
        "modules.json": [
            {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for at, (path, kind) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": config["max_position_embeddings"], "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": config["hidden_size"],
            "pooling_mode_cls_token": True,
            "pooling_mode_mean_tokens": False,
        },
    }
    for name, content in written.items():
        (building / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    building.rename(target)
