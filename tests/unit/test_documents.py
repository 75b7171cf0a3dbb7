"""Documents: a link leads to a file, and to a heading that it has; a whole `care` command of a block is taken."""

import re
import shlex
from pathlib import Path

import pytest

import cli
from tests.unit.deploy.support import parse_care

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
# What follows two spaces is a remark; what has an ellipsis or a substitution is not whole.
COMMAND = re.compile(
    r"^\s*(?:\w+=\S+ )*(?:\S+/)?care ([a-z]+\b(?:(?!  | #)[^…|>;&$\[\n])*+)(?![…$\[])",
    re.MULTILINE,
)


DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(each for part in ("docs", "examples", "models") for each in (ROOT / part).rglob("*.md"))]
)


def anchors(path: Path) -> set[str]:
    """The names that a page shows for its headings: letters, digits and hyphens."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for place, heading in LINK.findall(CODE.sub("", path.read_text(encoding="utf-8"))):
        target = path.parent / place if place else path
        if not target.exists() or (heading and target.suffix == ".md" and heading not in anchors(target)):
            broken.append(f"{place}#{heading}")
    assert not broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_taken(path: Path) -> None:
    blocks = [re.sub(r"\s*\\\n\s*", " ", block) for block in BLOCK.findall(path.read_text(encoding="utf-8"))]
    for command in (command for block in blocks for command in COMMAND.findall(block)):
        words = shlex.split(command)
        assert words[0] in cli.COMMANDS
        if words[0] != "demo" and tuple(words[:2]) not in cli.PARTS:
            parse_care(words)
    assert not [line for block in blocks for line in block.splitlines() if line.lstrip().startswith("--")], "lacks a \\"
