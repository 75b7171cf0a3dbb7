"""What `care curate` makes of its options: the step that was named, with what was given and defaults for the rest."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from models.curation.command import add_arguments
from models.curation.dedup import Dedup
from models.curation.frame import Step
from models.curation.hyde import Hyde
from models.curation.judge import JudgeRows
from models.curation.match import Match
from models.curation.mine import Mine, Pool
from models.curation.panel import Limits, Model
from models.curation.search import Retrievers
from models.curation.split import Split
from models.curation.synthesize import Synthesize

ROWS = [Path("r")]
ASKED = ([Model("m", "http://x")], Path("o.jsonl.answers.jsonl"))
FOUND = Retrievers([Path("c")], [], True, Path("o.jsonl.vectors"))
CASES = [
    ("split r --by sentence --from-pairs", Split(by="sentence", from_pairs=True)),
    ("dedup r --near 0", Dedup(near=0.0)),
    ("mine r --corpus c --bm25 --ranks 1 9", Mine(ROWS, FOUND, ranks=[1, 9])),  # type: ignore[arg-type]
    ("pool r --corpus c --bm25 --depth 3", Pool(FOUND, depth=3)),
    ("synthesize r --kind tasks --model m@http://x --language en", Synthesize(*ASKED, "tasks", ROWS, language="en")),
    ("hyde r --model m@http://x --corpus c --bm25 --blind", Hyde(*ASKED, FOUND, blind=True)),
    ("match r --model m@http://x --task select --selected 2", Match(*ASKED, "select", selected=2)),
    ("judge r --judge m@http://x --no-promote --at-once 2", JudgeRows(*ASKED, promote=False, limits=Limits(at_once=2))),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), CASES, ids=[line.split()[0] for line, _ in CASES])
def test_a_step_is_made_of_the_options_that_were_given(line: str, expected: Step) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args([*line.split(), "--out", "o.jsonl"])
    assert repr(arguments.make(arguments)) == repr(expected)
