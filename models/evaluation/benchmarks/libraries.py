"""Sets that a library brings: mteb's tasks, and dataset repositories of the hub, turned into our own values.

The libraries are imported when a set is asked for; without them, or without a network, the reason is told at once.
Knows nothing of folders (see `loader`).
"""

from __future__ import annotations

import importlib
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from models.errors import CareError
from models.evaluation.benchmarks.spec import SetSpec
from models.evaluation.mteb_import import import_mteb
from models.evaluation.sets import Kind, PairSet, RerankSet, RetrievalSet

AnySet = RetrievalSet | RerankSet | PairSet

PROBE_SECONDS = 5
SUBSET = "default"
"""What mteb calls the only subset of a task in one language."""


class Unavailable(CareError):
    """A set that could not be brought; the message is the reason."""


def unreachable() -> str | None:
    """Why the hub cannot be reached; None if it can, or if it is not to be asked and downloads of before must do.

    The libraries themselves try for half a minute a file before they give up.
    """
    try:
        hub = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        return "huggingface_hub is not installed; pip install mteb"
    if hub.HF_HUB_OFFLINE:
        return None
    try:
        with urllib.request.urlopen(urllib.request.Request(hub.ENDPOINT, method="HEAD"), timeout=PROBE_SECONDS):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"{hub.ENDPOINT} cannot be reached ({reason}); HF_HUB_OFFLINE=1 reads what was downloaded before"


def fetch(item: SetSpec) -> AnySet:
    """The set by the library that its description names; Unavailable says why it does not come."""
    try:
        return _by_mteb(item) if item.mteb else _by_hub(item)
    except CareError:
        raise
    except Exception as error:  # the errors of mteb, datasets and the hub have no common class
        reason = str(error).strip().partition("\n")[0]
        raise Unavailable(f"{source_of(item)}: {type(error).__name__}: {reason}") from error


def source_of(item: SetSpec) -> str | None:
    """Where a library would look for the set, in words; None if only a folder can bring it."""
    if item.mteb:
        return f"mteb task {item.mteb}"
    return f"hub dataset {item.hub}" if item.hub else None


def _by_mteb(item: SetSpec) -> AnySet:
    task = import_mteb().get_task(item.mteb, eval_splits=[item.split])
    task.load_data()
    return from_mteb(task, item)


def from_mteb(task: Any, item: SetSpec) -> AnySet:  # noqa: ANN401 -- mteb need not be installed
    """A loaded mteb task (AbsTaskRetrieval, which reranks too, or AbsTaskSTS) as a set of the description's kind."""
    if item.kind is Kind.STS:
        first, second = task.column_names
        rows = task.dataset[item.split]
        return PairSet(item.name, list(zip(rows[first], rows[second], strict=True)), [float(s) for s in rows["score"]])
    task.convert_v1_dataset_format_to_v2(num_proc=None)
    split = task.dataset[SUBSET][item.split]
    documents = {row["id"]: document_text(row) for row in split["corpus"]}
    queries = {row["id"]: row["text"] for row in split["queries"]}
    qrels = {query: split["relevant_docs"][query] for query in queries}
    if item.kind is not Kind.RERANK:
        return _retrieval_set(item, documents, queries, qrels)
    lists = [
        [(documents[document], int(qrels[query].get(document, 0))) for document in split["top_ranked"][query]]
        for query in queries
    ]
    return RerankSet(item.name, list(queries.values()), lists, item.relevant)


def _by_hub(item: SetSpec) -> AnySet:
    """Reranking: one table of queries with their candidates (SciRepEval). Retrieval: three tables (CMIRB)."""
    try:
        load = importlib.import_module("datasets").load_dataset
    except ImportError as error:
        raise Unavailable("datasets is not installed; pip install mteb") from error
    if item.kind is Kind.RERANK:
        return from_candidates(load(item.hub, item.subset, split=item.split), item)
    documents = {row["id"]: row["text"] for row in load(item.hub, "corpus", split="corpus")}
    queries = {row["id"]: row["text"] for row in load(item.hub, "queries", split="queries")}
    qrels: dict[str, dict[str, int]] = {}
    for row in load(item.hub, SUBSET, split=item.split):
        qrels.setdefault(row["q_id"], {})[row["p_id"]] = row["score"]
    return _retrieval_set(item, documents, {query: text for query, text in queries.items() if query in qrels}, qrels)


def from_candidates(rows: Any, item: SetSpec) -> RerankSet:  # noqa: ANN401 -- a datasets.Dataset
    """Rows {query: paper, candidates: [paper with a score]}; a paper has title and abstract."""
    queries, lists = [], []
    for row in rows:
        queries.append(document_text(row["query"], "abstract"))
        lists.append([(document_text(paper, "abstract"), int(paper["score"])) for paper in row["candidates"]])
    return RerankSet(item.name, queries, lists, item.relevant)


def document_text(row: Mapping[str, Any], field: str = "text") -> str:
    """Title and text on two lines, as sets in folders are read."""
    title, text = row.get("title") or "", row.get(field) or ""
    return f"{title}\n{text}" if title and text else title or text


def _retrieval_set(
    item: SetSpec, documents: dict[str, str], queries: dict[str, str], qrels: Mapping[str, Mapping[str, int]]
) -> RetrievalSet:
    grades = {query: {document: int(grade) for document, grade in qrels[query].items()} for query in queries}
    for query, of_query in grades.items():
        for document in of_query.keys() - documents.keys():
            raise Unavailable(f"{source_of(item)}: document {document!r} of query {query!r} is not in the corpus")
    texts = list(documents.values())
    return RetrievalSet(item.name, list(documents), texts, list(queries), list(queries.values()), grades)
