import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from models.errors import BadData
from models.tokenizer import Tokenizer
from models.training.data import Pair, PairTable, TokenTable, read_pairs
from models.training.teacher import LexicalTeacher, stretch

BUNDLED = Path("models/pretrained/care-small-zh/tokenizer.json")
CPU = torch.device("cpu")
ROW = {"query": "问", "pos": ["答"], "source": "s"}


def tokenizer(length: int = 16) -> Tokenizer:
    return Tokenizer.load(BUNDLED, length)


def table(*texts: str) -> TokenTable:
    return TokenTable.build(texts, tokenizer(), CPU, "texts")


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".gz", gzip.open), (".xz", lzma.open)])
def test_pairs_are_read_plain_and_packed(tmp_path: Path, suffix: str, opener) -> None:  # noqa: ANN001
    path = tmp_path / f"pairs.jsonl{suffix}"
    with opener(path, "wt") as file:
        file.write(json.dumps(ROW) + "\n")
    assert list(read_pairs(path)) == [Pair("问", ["答"], [], "s")]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"query": "q"}',
        '{"query": "q", "pos": []}',
        '{"query": "", "pos": ["p"]}',
        '{"query": 1, "pos": ["p"]}',
    ],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(BadData, match=r"pairs\.jsonl:2"):
        list(read_pairs(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="cannot be read"):
        list(read_pairs(tmp_path / "none.jsonl"))


def test_rows_are_gathered_as_the_tokenizer_gave_them() -> None:
    texts = ["感冒", "高血压的治疗", "药"]
    ids, mask = table(*texts).padded(torch.tensor([2, 1]))
    expected = [tokenizer()(texts[2]).ids, tokenizer()(texts[1]).ids]
    assert [row[: int(m.sum())].tolist() for row, m in zip(ids, mask, strict=True)] == expected
    assert int(ids[0, 3:].sum()) == 0


def test_a_crop_is_a_span_of_the_text_between_its_markers() -> None:
    text = "一二三四五六七八九十甲乙丙丁"
    whole = tokenizer()(text).ids
    for seed in range(20):
        ids, mask = table("短", text).cropped(torch.tensor([1, 0]), np.random.default_rng(seed), 10)
        crop = ids[0, : int(mask[0].sum())].tolist()
        inner = crop[1:-1]
        assert crop[0] == whole[0]
        assert crop[-1] == whole[-1]
        assert 4 <= len(inner) <= 8
        start = whole.index(inner[0])
        assert whole[start : start + len(inner)] == inner
        assert ids[1, : int(mask[1].sum())].tolist() == tokenizer()("短").ids


def test_equal_texts_are_one_document(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"query": "a", "pos": ["同"], "neg": ["异"]}, {"query": "b", "pos": ["同"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = PairTable.build([path], (tokenizer(), tokenizer()), CPU)
    assert pairs.positives == [[0], [0]]
    assert pairs.negatives == [[1], []]
    assert len(pairs.documents) == 2


def test_the_lexical_teacher_prefers_shared_rare_bigrams() -> None:
    documents = table("高血压的治疗", "糖尿病的治疗", "骨折的固定")
    teacher = LexicalTeacher.fit(documents)
    scores = teacher.scores(table("高血压").padded(torch.tensor([0])), documents.padded(torch.arange(3)))
    assert scores[0].argmax() == 0
    assert scores[0, 0] == 1
    assert scores[0, 2] == 0


def test_markers_are_no_bigrams() -> None:
    documents = table("甲", "乙")
    scores = LexicalTeacher.fit(documents).scores(documents.padded(torch.arange(2)), documents.padded(torch.arange(2)))
    assert scores.abs().sum() == 0


def test_stretch_takes_each_row_to_zero_and_one() -> None:
    assert stretch(torch.tensor([[2.0, 4.0, 3.0], [5.0, 5.0, 5.0]])).tolist() == [[0.0, 1.0, 0.5], [0.0, 0.0, 0.0]]
