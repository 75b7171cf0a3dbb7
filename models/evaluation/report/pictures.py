"""Which pictures a run has data for, each with its title and how to read it.

Imports matplotlib: import this module only where pictures are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from models.evaluation.report import curves, quality, theme
from models.evaluation.results import Run
from models.evaluation.studies import DIMENSIONS, INDEXES, SIMILARITIES


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure, the name of its files, and the words around it."""

    name: str
    title: str
    caption: str
    figure: Figure


def draw(run: Run) -> list[Picture]:
    """Every picture that the run has data for; a system has one colour and shape in all of them."""
    named = (*(result.system for result in run.results), *(curve.system for curve in run.curves))
    places = {system: place for place, system in enumerate(dict.fromkeys(named))}
    studies = {study: [curve for curve in run.curves if curve.study == study] for study in STUDIES}
    with theme.applied():
        drawn = {
            SPEED: quality.speed(run, places),
            TASKS: quality.tasks(run, places) if run.results else None,
            DIMENSIONS: curves.dimensions(studies[DIMENSIONS], places) if studies[DIMENSIONS] else None,
            INDEXES: curves.indexes(studies[INDEXES]) if studies[INDEXES] else None,
            SIMILARITIES: curves.similarities(studies[SIMILARITIES]) if studies[SIMILARITIES] else None,
        }
    return [Picture(name, *WORDS[name], figure) for name, figure in drawn.items() if figure is not None]


STUDIES = (DIMENSIONS, INDEXES, SIMILARITIES)
SPEED, TASKS = "speed", "sets"
WORDS = {
    SPEED: (
        "Quality against speed",
        "The mean over the retrieval sets of a benchmark, against queries per second when a system is asked one query"
        " at a time. Up and to the right is better: no system is both faster and better than one on the dashed line.",
    ),
    TASKS: ("Quality on each set", "The figure that the papers print for each set, in percent; the best one is bold."),
    DIMENSIONS: (
        "How short a vector may be",
        "Quality when every embedding is cut off after its first dimensions and brought back to unit length. The last"
        " point of a line is the whole vector.",
    ),
    INDEXES: (
        "Approximate search against exact search",
        "The share of the ten nearest documents that an index finds, against queries per second of one thread that is"
        " asked one query at a time, the encoder left out. Numbers beside points are the index's setting.",
    ),
    SIMILARITIES: (
        "Answers among other documents",
        "How the cosines of queries with documents are spread: documents that answer the query, the best-ranked one"
        " that is not known to, and others at random. The further answers lie to the right of the rest, the better;"
        " among the hardest others may be answers that nobody has judged.",
    ),
}
