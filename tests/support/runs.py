"""Small hand-made runs, as `care eval` would have saved them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from models.evaluation import studies
from models.evaluation.results import GOLD_SCORE, SIMILARITY, Curve, QueryResult, Run, SetResult, SystemFacts
from models.evaluation.sets import Kind


def set_result(
    system: str,
    values: Sequence[float],
    set_name: str = "one",
    benchmark: str = "bench",
    queries_per_second: float | None = None,
) -> SetResult:
    """Makes the result of a retrieval set, nDCG@10, with these values of its queries."""
    queries = [
        QueryResult(f"q{number}", f"问题 {number}", {"nDCG@10": value, "MRR@10": value})
        for number, value in enumerate(values)
    ]
    mean = 100 * sum(values) / len(values)
    figures = {"nDCG@10": mean, "MRR@10": mean}
    return SetResult(benchmark, set_name, Kind.RETRIEVAL, system, "nDCG@10", figures, queries, queries_per_second)


def pair_result(
    system: str, similarities: Sequence[float], scores: Sequence[float], value: float, metric: str = "Pearson"
) -> SetResult:
    """Makes the result of sentence pairs, with the given figure."""
    pairs = [
        QueryResult(str(number), f"甲 {number}\n乙 {number}", {SIMILARITY: similarity, GOLD_SCORE: score})
        for number, (similarity, score) in enumerate(zip(similarities, scores, strict=True))
    ]
    return SetResult("bench", "pairs", Kind.STS, system, metric, {metric: value}, pairs, None)


def make_run(
    results: Sequence[SetResult], curves: Sequence[Curve] = (), missing: Mapping[str, str] | None = None
) -> Run:
    systems = [SystemFacts(name, "encoder", dim=512) for name in dict.fromkeys(result.system for result in results)]
    return Run(
        made="2026-01-02T03:04:05Z",
        command="care eval data --baseline BM25",
        machine="2 cores, x86_64",
        seconds=12.5,
        systems=systems,
        results=list(results),
        curves=list(curves),
        missing=dict(missing or {}),
    )


def full_run() -> Run:
    """Makes a run of three systems on two retrieval sets and sentence pairs, with all studies, for every figure."""
    results = []
    for set_name in ("one", "two"):
        for place, system in enumerate(("BM25", "small", "dense")):
            values = [min(1.0, 0.3 * place + 0.01 * (number % 7)) for number in range(40)]
            results.append(set_result(system, values, set_name, queries_per_second=400.0 / (1 + place)))
    results.append(pair_result("dense", [0.1, 0.9] * 20, [0.0, 1.0] * 20, 99.0))
    curves = [
        curve for set_name in ("one", "two") for system in ("small", "dense") for curve in _curves(set_name, system)
    ]
    return make_run(results, curves, {"MedicalRetrieval": "put it into data/MedicalRetrieval"})


def _curves(set_name: str, system: str) -> list[Curve]:
    def curve(study: str, line: str, points: list[tuple[float, float]], labels: Sequence[str] = ()) -> Curve:
        return Curve(study, set_name, system, line, "x", "y", points, list(labels))

    return [
        curve(studies.DIMENSIONS, system, [(64.0, 40.0), (128.0, 55.0), (256.0, 60.0 if system == "small" else 70.0)]),
        curve(studies.INDEXES, studies.FLAT, [(100.0, 100.0)], [""]),
        curve(studies.INDEXES, studies.HNSW, [(9000.0, 90.0), (3000.0, 99.0)], ["10", "40"]),
        curve(studies.INDEXES, studies.IVF, [(7000.0, 60.0), (2000.0, 97.0)], ["1", "8"]),
        curve(studies.SIMILARITIES, studies.POSITIVES, [(0.66, 0.0), (0.7, 60.0), (0.74, 40.0), (0.78, 0.0)]),
        curve(studies.SIMILARITIES, studies.HARD_NEGATIVES, [(0.5, 0.0), (0.54, 100.0), (0.58, 0.0)]),
        curve(studies.SIMILARITIES, studies.RANDOM_NEGATIVES, [(0.1, 0.0), (0.14, 100.0), (0.18, 0.0)]),
    ]
