import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tantivy

from models import lexical
from models.errors import CareError
from models.lexical import LexicalIndex, query_terms, terms

TEXTS = ["高血压吃什么药", "糖尿病的饮食", "血压计的使用", "Drugs for hypertension", "高血压与糖尿病"]

# Names with a question particle, part of a question word, a single letter, or an acronym like one.
LISTED = """吗啡、盐酸吗啡、硫酸吗啡缓释片、阿扑吗啡、烯丙吗啡、乙基吗啡、二乙酰吗啡、氢吗啡酮、羟吗啡酮、吗啡喃、
吗丁啉、吗啉、吗啉胍、盐酸吗啉胍片、吗替麦考酚酯、吗氯贝胺、吗茚酮、吗多明、吗乙苯吡酮、阿吗灵、何首乌、制何首乌、
首乌藤、没药、乳香没药、少腹逐瘀汤、维生素A、辅酶A、甲型流感A、WHO指南、who标准、vitamin A、vitamin B、vitamin C、
vitamin D、vitamin E、vitamin K、vitamin a、hepatitis A、hepatitis B、hepatitis C、hepatitis E、hepatitis a、
influenza A、influenza B、coenzyme A、haemophilia A、protein C、protein S、factor V、immunoglobulin A、
botulinum toxin A、cyclosporin A、WHO、WHO guidelines、who guidelines、IS、DO、DID、CAN、ARE、AN、THE、HOW、FDA、
NICE、CDC、EMA、NIH、AHA、ESC、ADA"""
NAMES = LISTED.replace("\n", "").split("、")


def test_chinese_becomes_characters_and_bigrams_and_words_stay_whole() -> None:
    assert terms("血压高 Amlodipine") == ["血", "压", "高", "血压", "压高", "amlodipine"]


def test_full_width_and_case_are_folded_and_decimals_stay_together() -> None:
    assert terms("ＡＢＣ 2.5mg") == ["abc", "2.5", "mg"]


def test_question_words_are_dropped_from_a_query_unless_nothing_else_is_left() -> None:
    assert query_terms("高血压吃什么药") == [*terms("高血压吃"), *terms("药")]
    assert query_terms("What is Aspirin?") == ["aspirin"]
    assert query_terms("什么") == terms("什么")


def test_question_particles_are_removed_at_the_end_of_a_clause_only() -> None:
    assert query_terms("感冒了能喝酒吗？会头晕么") == [*terms("感冒了能喝酒"), *terms("会头晕")]
    assert query_terms("发烧吃药了吗 怎么办呢") == terms("发烧吃药了")
    assert query_terms("吗啡能止痛吗") == terms("吗啡能止痛")


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        ("酒吧", "酒吧"),
        ("高压氧吧", "氧吧"),
        ("因为何首乌中毒", "何首"),
        ("作为何首乌的替代品", "何首"),
        ("该病多少见", "多少"),
    ],
)
def test_words_that_look_like_question_words_are_kept(query: str, kept: str) -> None:
    assert kept in query_terms(query)


def test_a_final_particle_after_a_verb_is_still_removed() -> None:
    assert query_terms("这样可以吧") == query_terms("这样可以")
    assert query_terms("为何头痛") == query_terms("头痛")


@pytest.mark.parametrize("name", NAMES)
def test_no_term_of_a_drug_name_is_dropped_as_a_question_word(name: str) -> None:
    for query in (f"{name}的副作用", f"what is {name}", f"什么是{name}？", name, f"{name} 副作用", f"怎么用{name}呢"):
        assert set(terms(name)) <= set(query_terms(query)), query


def test_capitals_are_acronyms_and_who_is_a_question_word_only_before_a_verb() -> None:
    assert query_terms("WHO guidelines on DID") == ["who", "guidelines", "on", "did"]
    assert query_terms("who guidelines") == ["who", "guidelines"]
    assert query_terms("Who should take statins?") == ["take", "statins"]
    assert query_terms("How can hepatitis A spread?") == ["hepatitis", "a", "spread"]


def test_morphine_is_found_by_its_name_before_coffee() -> None:
    index = LexicalIndex.build(["咖啡的副作用：心悸、失眠。", "吗啡的副作用：便秘、呼吸抑制。"])
    assert index.search("吗啡的副作用", 2)[0].tolist() == [1, 0]


def test_a_read_only_folder_can_be_opened_and_is_not_changed(tmp_path: Path) -> None:
    LexicalIndex.build(TEXTS, tmp_path / "lexical")
    for lock in (tmp_path / "lexical").glob("*.lock"):
        lock.unlink()
    before = sorted(path.name for path in (tmp_path / "lexical").iterdir())
    assert LexicalIndex.load(tmp_path / "lexical").search("糖尿病", 1)[0].tolist() in ([1], [4])
    assert sorted(path.name for path in (tmp_path / "lexical").iterdir()) == before


def test_a_lock_file_that_appears_during_clean_up_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LexicalIndex.build(["高血压", "糖尿病"], tmp_path / "index")
    (tmp_path / "links").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "links"))
    remove, refusals = shutil.rmtree, [OSError("Directory not empty"), FileNotFoundError("the lock went first")]

    def contended(folder: Path, ignore_errors: bool = False) -> None:
        if refusals:
            raise refusals.pop()
        remove(folder, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", contended)
    assert len(LexicalIndex.load(tmp_path / "index")) == 2
    assert not refusals
    assert not list((tmp_path / "links").iterdir())


def test_only_rows_that_share_a_term_are_found_best_first() -> None:
    rows, scores = LexicalIndex.build(TEXTS).search("高血压", 10)
    assert rows.tolist()[:2] == [0, 4] or rows.tolist()[:2] == [4, 0]
    assert set(rows.tolist()) == {0, 2, 4}
    assert (np.diff(scores) <= 0).all()


def test_equal_scores_are_ordered_by_row() -> None:
    rows, _ = LexicalIndex.build(["感冒", "发烧", "感冒", "感冒"]).search("感冒", 10)
    assert rows.tolist() == [0, 2, 3]


def test_a_query_without_terms_finds_nothing() -> None:
    rows, scores = LexicalIndex.build(TEXTS).search("？！…", 5)
    assert len(rows) == len(scores) == 0


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("share", [0.005, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("against", [False, True])
def test_a_filter_gives_the_best_allowed_rows(share: float, against: bool, step: int) -> None:
    """With a step, most of the allowed row numbers are not in the index: they are later passages."""
    texts = (f"高血压{'慢性病' * (row % 7)} 第{row}种药" for row in range(2000))
    index = LexicalIndex.build(texts, rows=range(0, 2000 * step, step))
    rows, scores = index.search("高血压药", 2000)
    assert set(rows.tolist()) == set(range(0, 2000 * step, step))
    allowed = np.repeat(np.random.default_rng(0).random(2000) < share, step)
    if against:  # every allowed row ranks behind all forbidden ones
        allowed = np.zeros(2000 * step, bool)
        allowed[rows[-int(2000 * share) :]] = True
        allowed = np.repeat(allowed[::step], step)
    for k in (1, 10, 300):
        found = index.search("高血压药", k, allowed)
        expected = rows[allowed[rows]][:k], scores[allowed[rows]][:k]
        np.testing.assert_array_equal(np.sort(found[0]), np.sort(expected[0]))
        np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("permitted", [60, 200, 600, 1000, 1400, 1980])
def test_a_filter_against_the_query_fetches_a_bounded_number_of_hits(
    monkeypatch: pytest.MonkeyPatch, permitted: int
) -> None:
    monkeypatch.setattr(lexical, "_MOST_HITS", 100)
    monkeypatch.setattr(lexical, "_MOST_ALLOWED", 500)
    index = LexicalIndex.build(["高血压" + "慢" * (row // 20) for row in range(2000)])
    allowed = np.arange(2000) >= 2000 - permitted
    fetched = []
    hits = index._hits

    def counted(query: tantivy.Query, limit: int) -> lexical.Ranking:
        fetched.append(limit)
        return hits(query, limit)

    monkeypatch.setattr(index, "_hits", counted)
    rows, _ = index.search("高血压", 5, allowed)
    assert sum(fetched) <= 2 * 100
    if permitted <= 500 or permitted >= 2000 - 95:  # few rows are allowed, or few forbidden: nothing is missed
        assert rows.tolist() == list(range(2000 - permitted, 2005 - permitted))


def test_a_filter_that_allows_nothing_finds_nothing() -> None:
    assert len(LexicalIndex.build(TEXTS).search("高血压", 5, np.zeros(len(TEXTS), dtype=bool))[0]) == 0


def test_an_index_on_disk_answers_like_one_in_memory(tmp_path: Path) -> None:
    built = LexicalIndex.build(TEXTS, tmp_path / "lexical")
    loaded = LexicalIndex.load(tmp_path / "lexical")
    for query in ("高血压", "糖尿病饮食", "hypertension"):
        for ours, theirs in zip(built.search(query, 5), loaded.search(query, 5), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CareError, match="not a lexical index"):
        LexicalIndex.load(tmp_path)


def test_scores_are_bm25() -> None:
    """Against the formula, with document lengths that tantivy's one-byte norms keep exactly."""
    texts = ["发热 咳嗽", "发热 发热 头痛", "腹泻 呕吐"]
    counts = [terms(text) for text in texts]
    mean = np.mean([len(own) for own in counts])
    expected = []
    for own in counts[:2]:
        score = 0.0
        for term in terms("发热"):
            frequency = own.count(term)
            idf = np.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
            score += idf * frequency * 2.2 / (frequency + 1.2 * (0.25 + 0.75 * len(own) / mean))
        expected.append(score)
    rows, scores = LexicalIndex.build(texts).search("发热", 3)
    np.testing.assert_allclose(scores, sorted(expected, reverse=True), rtol=1e-5)
    assert rows.tolist() == list(np.argsort(expected)[::-1])
