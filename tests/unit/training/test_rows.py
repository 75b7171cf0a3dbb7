import gzip
import json
import lzma
import random
import re
from pathlib import Path

import pytest

from models.errors import BadData
from models.rows import Pair, count_units, read_lines, read_pairs, sample, unit_spans
from models.training.rows import as_pairs, as_texts, crops_of, halves, sentences_of, without
from models.training.stages import Data
from models.training.work import read_table
from tests.support.toy_training import ONE, write_rows

ROW = {"query": "问", "pos": ["答"], "source": "s"}
TEXT = "感冒由病毒引起。多喝水，多休息。体温超过三十八度五再吃退烧药。Most colds end within ten days."


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".gz", gzip.open), (".xz", lzma.open)])
def test_pairs_are_read_plain_and_compressed(tmp_path: Path, suffix: str, opener) -> None:  # noqa: ANN001
    path = tmp_path / f"pairs.jsonl{suffix}"
    rows = [ROW, {"query": "q", "pos": ["p"], "neg": ["n"], "instruction": "Find: ", "hypothetical": ["h"]}]
    with opener(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in [*rows, {"title": "名", "text": "文"}, {"text": "无名"}])
    assert list(read_pairs(path)) == [
        Pair("问", ["答"], [], "s"),
        Pair("q", ["p"], ["n"], "pairs", "Find: ", ["h"]),
        Pair("名", ["文"], [], "pairs"),
        Pair("", ["无名"], [], "pairs"),
    ]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "not JSON"),
        ('{"text": "t", "n": ' + "1" * 5000 + "}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must have query and pos, or text"),
        ('{"query": "q"}', "must have query and pos, or text"),
        ('{"query": "q", "pos": []}', "at least one text"),
        ('{"query": "q", "pos": "p"}', "must be lists"),
        ('{"query": "q", "pos": ["p"], "neg": null}', "must be lists"),
        ('{"query": "", "pos": ["p"]}', "query must be"),
        ('{"query": 1, "pos": ["p"]}', "query must be"),
        ('{"query": "q", "pos": ["p"], "neg": [""]}', "no text may be empty"),
        ('{"query": "q", "pos": ["p"], "source": 3}', "must be strings"),
        ('{"text": ""}', "no text may be empty"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path, line: str, wrong: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(BadData, match=rf"pairs\.jsonl:2: .*{wrong}"):
        list(read_pairs(path))


def test_blank_lines_are_skipped_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    path, row = tmp_path / "pairs.jsonl", json.dumps(ROW)
    path.write_text(f"\ufeff\n{row}\n \t\r\n{row}\n\n\n", encoding="utf-8")
    assert [(line.text.strip(), line.number) for line in read_lines(path)] == [(row, 2), (row, 4)]
    assert sample([path], 9, 0)[0] == len(list(read_pairs(path))) == 2
    path.write_text(f"\n{row}\n\n{{\n")
    with pytest.raises(BadData, match=r"pairs\.jsonl:4: not JSON"):
        list(read_pairs(path))


def test_a_missing_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="cannot be read"):
        list(read_pairs(tmp_path / "none.jsonl"))
    whole = gzip.compress((json.dumps(ROW) + "\n").encode() * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadData, match=r"cut\.jsonl\.gz:\d+: damaged.* fetch the file again"):
        list(read_pairs(tmp_path / "cut.jsonl.gz"))
    (tmp_path / "changed.jsonl.gz").write_bytes(whole[:10] + b"\xff" + whole[11:])
    with pytest.raises(BadData, match=r"changed\.jsonl\.gz:1: damaged.* fetch the file again"):
        list(read_pairs(tmp_path / "changed.jsonl.gz"))
    lines = [json.dumps({"query": "发热", "pos": ["p"]}, ensure_ascii=False).encode()] * 1000
    (tmp_path / "gbk.jsonl").write_bytes(b"\n".join([*lines, '{"query": "发热"}'.encode("gbk"), *lines]))
    with pytest.raises(BadData, match=r"gbk\.jsonl:1001: damaged or not UTF-8.* convert the file"):
        list(read_pairs(tmp_path / "gbk.jsonl"))


@pytest.mark.parametrize("ending", ["gz", "xz"])
def test_a_plain_file_with_the_name_of_a_compressed_one_is_refused(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"plain.jsonl.{ending}").write_text(json.dumps(ROW) + "\n")
    with pytest.raises(BadData, match=rf"plain\.jsonl\.{ending}: not {ending}, or damaged .* correct its name"):
        list(read_pairs(tmp_path / f"plain.jsonl.{ending}"))


def test_crops_are_spans_of_whole_words_and_are_the_same_for_the_same_seed() -> None:
    found = [next(crops_of(TEXT, 1, random.Random(seed))) for seed in range(50)]
    assert all(span in TEXT for span in found)
    assert len(set(found)) > 20
    assert not any(span.endswith("colds"[:3]) for span in found)
    assert found == [next(crops_of(TEXT, 1, random.Random(seed))) for seed in range(50)]


def test_crops_are_as_long_as_the_recipe_says() -> None:
    text = "字" * 500
    lengths = [len(next(crops_of(text, 1, random.Random(seed), (100, 300)))) for seed in range(50)]
    assert min(lengths) >= 100
    assert 250 < max(lengths) <= 300
    texts = as_texts([Pair("", [text], [], "a")], Data(files=["a"], crops={"*": 9.0}, crop_units=(450, 460)), 0)
    assert all(450 <= len(part) <= 460 for part, _ in list(texts)[1:])


def test_the_halves_of_a_text_share_nothing() -> None:
    for seed in range(50):
        parts = halves(TEXT, random.Random(seed))
        assert parts is not None
        first, second = parts
        assert first in TEXT
        assert second in TEXT
        assert first not in second
    assert halves("太短", random.Random(0)) is None


def test_untitled_documents_are_their_own_queries_and_crops_are_added_by_source() -> None:
    rows = [Pair("问", [TEXT], [], "a"), Pair("", [TEXT], [], "b"), Pair("", ["短"], [], "b")]
    found = list(as_pairs(rows, {"a": 2.0, "*": 0.0}, seed=0))
    assert [pair.source for pair in found] == ["a", "a", "a", "b"]
    assert found[0] == rows[0]
    assert all(pair.positives == [TEXT] and pair.query in TEXT for pair in found[1:3])
    assert found[3].query not in found[3].positives[0]


def test_every_text_sentence_and_crop_occurs_once() -> None:
    row = Pair("问", [TEXT], ["别的"], "a")
    assert list(as_texts([row], Data(files=["a"]), 0)) == [("问", "queries"), (TEXT, "a"), ("别的", "a")]
    assert list(as_texts([row], Data(files=["a"], documents=False), 0)) == [("问", "queries")]
    texts = [text for text, _ in as_texts([row], Data(files=["a"], crops={"*": 1.0}, sentences=True), 0)]
    assert set(sentences_of(TEXT)) < set(texts)
    assert len(texts) == 3 + 2 + len(sentences_of(TEXT))
    assert sentences_of(TEXT)[-1] == "Most colds end within ten days."


def test_a_byte_order_mark_and_lone_surrogates_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + rb'{"text": "\ud83d\ude00 a\ud83d"}' + b"\r\n" + rb'{"text": "\\ud800"}' + b"\r\n"
    )
    assert [pair.positives for pair in read_pairs(path)] == [["😀 a?"], [r"\ud800"]]


@pytest.mark.parametrize(
    "text", ["", " ", "a", "中", "BERT 模型 in 2024, 好。", "\u3000全角\u00a0x\u2003y\n", "𠀀a 㐀鿿ꀀ", "\ud800b"]
)
def test_a_unit_is_a_chinese_character_or_a_run_of_others_without_a_space(text: str) -> None:
    expected = [match.span() for match in re.finditer(r"[\u3400-\u9fff]|[^\s\u3400-\u9fff]+", text)]
    begins, ends = unit_spans(text)
    assert list(zip(begins.tolist(), ends.tolist(), strict=True)) == expected
    assert count_units(text) == len(expected)


def test_rows_of_a_source_are_left_out_and_a_wrong_name_is_refused() -> None:
    rows = [Pair("q", ["p"], [], source) for source in ("one", "two", "one")]
    assert [row.source for row in without(rows, ["one"])] == ["two"]
    assert list(without(rows, [])) == rows
    with pytest.raises(BadData, match=r"data.without: no row is of three"):
        list(without(rows, ["one", "three"]))


def test_a_row_has_the_same_crops_whatever_rows_come_before_it() -> None:
    data = Data(files=["f"], view="texts", crops={"*": 2.0}, crop_units=(4, 8))
    rows = [Pair("一", [TEXT], [], "one"), Pair("二", [TEXT], [], "two"), Pair("", [TEXT], [], "two")]
    alone = [text for row in rows for text, _ in as_texts([row], data, 7)]
    assert [text for text, _ in as_texts(rows, data, 7)] == alone
    assert len(set(alone)) > 7, "rows of one document have different crops"
    assert [text for text, _ in as_texts(rows, data, 8)] != alone
    pairs = [pair for row in rows for pair in as_pairs([row], data.crops, 7)]
    assert list(as_pairs(rows, data.crops, 7)) == pairs


def test_a_part_of_a_document_asks_for_the_rest_in_a_share_of_the_rows(tmp_path: Path) -> None:
    documents = [{"title": f"题{n}", "text": f"{n} {TEXT}", "source": "ab"[n % 2]} for n in range(40)]
    files = [write_rows(tmp_path / "rows.jsonl", documents)]
    for share, least, most in ((0.0, 0, 0), (0.5, 4, 16), (1.0, 20, 20)):
        table = read_table(files, Data(files=["x"], halves={"a": share}), 0, tmp_path / "texts", ONE)
        asked = {name: [table.queries.texts[row] for row in table.query[rows]] for name, rows in table.sources.items()}
        assert least <= sum(not query.startswith("题") for query in asked["a"]) <= most
        assert sorted(asked["b"]) == sorted(f"题{n}" for n in range(1, 40, 2))
    with pytest.raises(BadData, match="halves: no row is of c; the files have a, b"):
        read_table(files, Data(files=["x"], halves={"c": 1.0}), 0, tmp_path / "texts", ONE)
