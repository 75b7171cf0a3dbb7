"""`care curate clean --book`: what is removed from the pages of a book, and what is kept."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from cli import main
from models.curation.pages import running_heads, text_of_page


def page_text(text: str) -> str:
    return text_of_page({"text": text}, text, set(), Counter())


@pytest.mark.parametrize(
    "line",
    [
        "12",
        "- 12 -",
        "Page 12 of 340",
        "第 12 页",
        "第12页 共340页",
        "=====================",
        "BASE:  torch.Size([1, 256, 1280])",
        "Figure 3. Axial view of the mitral valve",
        "Fig. 3-2 Left ventricle",
        "Table 4: Doses",
        "图1-2 心脏结构",
        "**图 3** 瓣膜",
        "[12] A. Author. A title. 2010.",
    ],
)
def test_lines_that_are_not_text_are_removed(line: str) -> None:
    assert page_text(f"The heart has four chambers.\n{line}\nIt beats.") == "The heart has four chambers.\nIt beats."


@pytest.mark.parametrize(
    "line",
    [
        "Figure 3 shows that the valve is closed.",
        "图3显示瓣膜关闭。",
        "表现为胸痛。",
        "12 patients were treated.",
        "第12页的图有误。",
        "The interval was [0.8, 1.2].",
        "It was built (London, 1990s).",
        "$$",
    ],
)
def test_similar_looking_sentences_are_kept(line: str) -> None:
    assert page_text(f"a\n{line}\nb") == f"a\n{line}\nb"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Beta blockers help [3, 5-7].", "Beta blockers help."),
        ("冠心病多见于老年人[12]。", "冠心病多见于老年人。"),
        ("Statins help (Smith et al., 2010; Li & Wang 2011b).", "Statins help."),
        ("<|ref|>text<|/ref|><|det|>[[66, 12, 930, 80]]<|/det|>Aspirin.", "Aspirin."),
        ("## **Heart** failure", "Heart failure"),
    ],
)
def test_marks_within_a_line_are_removed(line: str, expected: str) -> None:
    assert page_text(line) == expected


def test_lines_repeated_at_the_page_ends_are_running_heads() -> None:
    pages = [
        {"text": f"{n}  CHAPTER 4 Heart\n{word} a\nb\nTreatment\nc\n{word} d\nA Handbook, p. {n}", "source": "a"}
        for n, word in enumerate(["one", "two", "three"])
    ]
    other = {"text": "Chapter 9 Heart\na\nb\nc\nd\ne", "source": "b"}
    heads = running_heads([*pages, other])
    notes = Counter[str]()
    assert text_of_page(pages[1], pages[1]["text"], heads, notes) == "two a\nb\nTreatment\nc\ntwo d"
    assert text_of_page(other, other["text"], heads, Counter()) == other["text"]
    assert notes == {"running heads": 2}


def test_the_command_removes_the_running_head_of_the_first_page_too(tmp_path: Path) -> None:
    words = ["one", "two", "three", "four"]
    pages = [{"text": f"A Handbook 7\n{word} a\nb\nc\n{word} d\n{word} e"} for word in words]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    main(["curate", "clean", str(tmp_path / "raw.jsonl"), "--out", str(tmp_path / "out.jsonl"), "--book"])
    made = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert made == [f"{word} a\nb\nc\n{word} d\n{word} e" for word in words]
    sources = {json.loads(line)["source"] for line in (tmp_path / "out.jsonl").read_text().splitlines()}
    assert sources == {"raw"}, "the book that states none is its file"
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["notes"]["running heads"] == 4


@pytest.mark.timeout(60)  # in the square of its length: hours
@pytest.mark.parametrize("piece", ["(A", "[1", "[1,2", "- a", "图1", "<|ref|>", "(Smith et al., 2010; "])
def test_a_long_line_takes_linear_time(piece: str) -> None:
    assert page_text(piece * 100_000) == (piece * 100_000).strip()
