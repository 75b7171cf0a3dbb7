"""General text is gathered from packages and repositories: archives and a repository made here, no network."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from models.curation import gather
from models.curation.extract import JOINED_CHARACTERS, LONGEST_CHARACTERS, members_within, passages
from models.curation.frame import Files, Tally, run_step
from models.curation.gather import Gather, Source, read_sources
from models.errors import BadData, CareError
from tests.support.curation import read_out, report_in

LONG = "春眠不觉晓，处处闻啼鸟；夜来风雨声，花落知多少。"


def taken(name: str, content: str | bytes, fields: tuple[str, ...] = ()) -> list[str]:
    return list(passages(name, content.encode() if isinstance(content, str) else content, fields))


def catalogue(*messages: str) -> bytes:
    """A compiled catalogue (.mo) of translations."""
    texts = [message.encode() for message in messages]
    table, place = b"", 28 + 8 * len(texts)
    for text in texts:
        table += struct.pack("<2I", len(text), place)
        place += len(text)
    return struct.pack("<7I", 0x950412DE, 0, len(texts), 28, 28, 0, 0) + table + b"".join(texts)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", LONG, [LONG]),
        ("a.txt", LONG.encode("gb18030"), [LONG]),
        ("a.txt", LONG.encode("utf-16"), [LONG]),
        ("a.json", json.dumps([{"say": LONG, "by": ["李白"]}, {"say": "静夜思是一首诗。"}]), [f"{LONG}\n李白"]),
        ("a.json", f'{{"say": "{LONG}", "by": "x"}}\n{{"say": "床前明月光，疑是地上霜。"}}',
         [LONG, "床前明月光，疑是地上霜。"]),
        ("a.html", f"<head><title>题</title></head><p class='x'>{LONG[:12]}</p><p>{LONG[12:]}&amp;</p><pre>代码</pre>",
         [f"{LONG[:12]}\n{LONG[12:]}&"]),
        ("a.md", f"## 一个**很长**的[标题](http://x)在这里\n```\n代码\n```\nOnly English.\n- {LONG}",
         [f"一个很长的标题在这里\n{LONG}"]),
        ("a.1", f'.\\" 注释注释\n.SH "名称"\n\\fBls\\fR \\- {LONG}', [f'"名称"\nls - {LONG}']),
        ("a.po", f'#~ 旧\nmsgid "x"\nmsgstr ""\n"{LONG[:12]}"\n"{LONG[12:]}\\n"\n', [LONG]),
        ("a.tex", f"\\section*{{绪言绪言绪言}}\n% 注释\n\\begin{{x}}[y]\n{LONG[:12]}\\textbf{{{LONG[12:]}}}约占5\\%",
         [f"绪言绪言绪言\n{LONG}约占5%"]),
        ("b.tex", f"\\item[甲] {LONG}\\\\% 注释\n$\\geq$5\\,$\\mu$g & \\cite[第5页]{{乙}}\\$7 \\url{{http://x/%20丙}}丁丁丁",
         [f"甲 {LONG}\n≥5μg   $7 丁丁丁"]),
        ("b.html", f"{LONG}<!-- <script> --><header>头</header> ![图](data:x,{'A' * 3000})春眠不觉晓&#{'9' * 5000};",
         [f"{LONG}\n头 春眠不觉晓;"]),
        ("b.md", f"```html\n<script>\n```\n{LONG}<!-- 注 -->```处处闻</script>啼鸟", [f"{LONG}\n处处闻啼鸟"]),
        ("a.properties", "key.one = 春眠不觉晓处处闻\\u557c\\u9e1f", ["春眠不觉晓处处闻啼鸟"]),
        ("a.mo", catalogue("Project-Id: x", LONG), [LONG]),
        ("a.png", b"\x89PNG\0\0" + LONG.encode(), []),
        ("a.txt", "Only a few of these words are 中文 and the rest is not", []),
    ],
)  # fmt: skip
def test_files_of_every_format_give_their_chinese(name: str, content: str | bytes, expected: list[str]) -> None:
    assert taken(name, content) == expected


def test_passages_are_joined_from_short_lines_and_cut_from_long_ones() -> None:
    joined = taken("a.txt", "\n".join([LONG] * 20))
    assert all(JOINED_CHARACTERS <= len(text) <= JOINED_CHARACTERS + 2 * len(LONG) for text in joined[:-1])
    cut = taken("a.txt", LONG * 100 + "长" * 2000)
    assert max(map(len, cut)) <= LONGEST_CHARACTERS
    assert all(text[-1] in "。；" for text in cut[:2])
    assert sum(map(len, cut)) == 100 * len(LONG) + 2000


def test_fields_choose_what_is_taken_of_objects() -> None:
    content = json.dumps({"list": [{"say": LONG, "user": "一个有名有姓的人在这里"}, ["没有名字的列表不会被取出来"]]})
    assert taken("a.json", content, ("say",)) == [LONG]


def test_a_prefix_is_removed_from_every_line() -> None:
    assert list(passages("a.txt", f"M {LONG}\nM {LONG}".encode(), prefix="[EM] ")) == [f"{LONG}\n{LONG}"]


@pytest.mark.parametrize("begin", ["<script>", "<!--", "\n```\n<pre>", "[一](", "![", "_", "\\cite[", "\\begin{"])
def test_many_beginnings_without_an_end_take_no_square_of_time(begin: str) -> None:
    """Looking for the end from each of them took some minutes at this size, and days at that of a large file."""
    for name in ("a.html", "a.tex"):
        assert list(passages(name, f"{begin * 200_000}\n{LONG}".encode()))[-1].endswith(LONG)


def test_packed_files_are_read_within_others_and_damaged_ones_left_out() -> None:
    damaged: list[str] = []
    assert list(members_within("a.1.gz", gzip.compress(b"x"), damaged)) == [("a.1", b"x")]
    within = zipped({"b.zip": zipped({"c.txt": "x"}), "d.gz": "no"})
    assert list(members_within("a.xpi", within, damaged)) == [("a.xpi/b.zip/c.txt", b"x")]
    assert list(members_within("a.zip", b"no", damaged)) == []
    assert damaged == ["a.xpi/d.gz", "a.zip"]


def zipped(files: dict[str, Any]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return held.getvalue()


def numbered(count: int) -> str:
    """Texts of one passage each."""
    return json.dumps([{"text": f"第{number}篇：{LONG}"} for number in range(count)])


def repository(folder: Path) -> str:
    """A repository with an attribute and a hook, which must not take effect, and a link that leads out of it."""
    work = folder / "work"
    work.mkdir(parents=True)
    (work / "a.json").write_text(numbered(30))
    (work / "not.json").write_text(numbered(31))
    os.symlink("/etc/passwd", work / "link.json")
    (work / ".gitattributes").write_text("*.json filter=evil\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "m"],
    ):
        subprocess.run(["git", *command], cwd=work, check=True)
    return str(work)


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of sources: a repository, a package whose members lead out of its folder, one that is nowhere."""
    link = tarfile.TarInfo("package/link.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"

    def npm(source: Source, folder: Path) -> None:
        with tarfile.open(folder / "held.tgz", "w:gz") as archive:
            archive.addfile(link)
            for name, content in (("../../out.json", numbered(3)), ("package/b.json", numbered(2))):
                member = tarfile.TarInfo(name)
                member.size = len(content.encode())
                archive.addfile(member, io.BytesIO(content.encode()))

    def pypi(source: Source, folder: Path) -> None:
        (folder / "held.whl").write_bytes(zipped({"../c.json": numbered(3), "d.json.gz": "no"}))

    monkeypatch.setattr(gather, "_npm", npm)
    monkeypatch.setattr(gather, "_pypi", pypi)
    url = repository(tmp_path / "remote")
    path = tmp_path / "list.toml"
    path.write_text(
        'most = 20\nsource = "general"\n'
        f'[git]\n"o/r" = {{ url = "{url}", files = ["*.json"], without = ["not*"], licence = "" }}\n'
        f'gone = {{ url = "{tmp_path / "nowhere"}", files = ["*"], licence = "none stated" }}\n'
        '[npm]\nheld = { version = "1", files = ["*.json"], licence = "MIT" }\n'
        '[pypi]\nwheel = { version = "1", files = ["*.json"], licence = "MIT", most = 0, source = "books" }\n'
        'empty = { version = "1", files = ["*.txt"], licence = "MIT" }\n'
    )
    return path


def gathered(listed: Path, out: Path, **options: bool) -> Tally:
    step = Gather([listed], listed.parent / "downloads", **options)
    return run_step(step, Files([listed], out))


def test_sources_are_gathered_with_their_limits_and_nothing_is_written_elsewhere(
    listed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").mkdir()
    tally = gathered(listed, tmp_path / "made" / "out.jsonl")
    rows = read_out(tmp_path / "made")
    assert dict(tally.notes) == {"from o/r": 20, "from held": 3, "from wheel": 3}
    assert rows[-1] == {"text": f"第2篇：{LONG}", "source": "books", "origin": "wheel"}
    assert {row["source"] for row in rows[:-3]} == {"general"}
    drawn = [int(row["text"][1:].partition("篇")[0]) for row in rows[:20]]
    assert drawn == sorted(set(drawn)), "in the order of the files"
    assert drawn[-1] > 20, "drawn from all of them"
    report = report_in(tmp_path / "made")
    assert list(report["skipped"]) == ["gone"]
    assert "nowhere" in report["skipped"]["gone"]
    assert report["without a passage"] == ["empty"]
    assert report["damaged"] == {"wheel": ["d.json.gz"], "empty": ["d.json.gz"]}
    assert "git gone: skipped" in capsys.readouterr().err
    assert not list(tmp_path.rglob("out.json"))
    assert {path.name for path in tmp_path.iterdir()} == {"remote", "list.toml", "downloads", "made"}


def test_a_second_call_fetches_nothing_and_gives_the_same_bytes_also_after_a_kill(
    listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    gathered(listed, first)
    for name in ("_git", "_npm", "_pypi"):
        monkeypatch.setattr(gather, name, lambda source, folder: (_ for _ in ()).throw(OSError("no network")))
    monkeypatch.setattr("models.curation.frame.SAVE_EVERY_ROWS", 5)
    texts_of = gather.texts_of
    monkeypatch.setattr(
        gather, "texts_of", lambda source, *rest: texts_of(source, *rest) if source.kind == "git" else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        gathered(listed, second)
    assert (tmp_path / "second.jsonl.part.json").is_file()
    monkeypatch.setattr(gather, "texts_of", texts_of)
    gathered(listed, second)
    assert second.read_bytes() == first.read_bytes()


def test_missing_sources_are_refused_if_strict_or_all(listed: Path, tmp_path: Path) -> None:
    with pytest.raises(CareError, match="--strict: 1 of 5 sources skipped: gone"):
        gathered(listed, tmp_path / "out.jsonl", strict=True)
    listed.write_text('[git]\ngone = { url = "/nowhere", files = ["*"], licence = "none stated" }')
    with pytest.raises(CareError, match="nothing was gathered"):
        gathered(listed, tmp_path / "out.jsonl")
    listed.write_text("[git]\ngone = { names = 1 }")
    with pytest.raises(BadData, match="not a list of sources"):
        gathered(listed, tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ('files = "*.md"', "files is a list of texts"),
        ('files = ["*.md"], without = "*.test.md"', "without is a list of texts"),
        ('files = ["*.md"], fields = "text"', "fields is a list of texts"),
        ("files = [5]", "files is a list of texts"),
        ('files = ["*.md"], version = 5', "version is a text"),
        ('files = ["*.md"], most = -3', "most is a whole number"),
    ],
)
def test_a_source_with_values_of_another_kind_is_refused(tmp_path: Path, facts: str, message: str) -> None:
    """A text has characters, and its star would match every path."""
    (tmp_path / "list.toml").write_text(f'[git]\n"o/r" = {{ {facts}, licence = "MIT" }}')
    with pytest.raises(BadData, match=f"o/r: {message}"):
        read_sources(tmp_path / "list.toml")


def test_a_damaged_download_is_named_and_an_empty_one_fetched_again(listed: Path, tmp_path: Path) -> None:
    gathered(listed, tmp_path / "first.jsonl")
    [archive] = (tmp_path / "downloads").glob("held-*/held.tgz")
    archive.unlink()
    gathered(listed, tmp_path / "second.jsonl")
    assert (tmp_path / "second.jsonl").read_bytes() == (tmp_path / "first.jsonl").read_bytes()
    archive.write_bytes(archive.read_bytes()[:60])
    with pytest.raises(BadData, match=r"held\.tgz: damaged .* delete its folder, and it is fetched again"):
        gathered(listed, tmp_path / "third.jsonl")


def test_the_bundled_lists_name_versions_and_licences() -> None:
    general, medical = (
        read_sources(Path(gather.__file__).with_name(f"{name}.toml")) for name in ("general", "medical")
    )
    assert len(general) > 40
    assert all(source.most and source.source == "generic" for source in general)
    assert {source.source for source in medical} == {"medical"}
    sources = [*general, *medical]
    assert all(source.licence and source.files for source in sources)
    assert all(source.version for source in sources if source.kind in ("pypi", "npm"))
    assert not [source.name for source in sources if source.kind not in ("pypi", "npm", "debian", "git")]
