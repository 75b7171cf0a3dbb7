"""docs/architecture.md names every module, and the links of the documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGES = ("models", "models/training", "indexer", "service")


def test_every_module_is_named_in_the_architecture_document() -> None:
    shown = Path("docs/architecture.md").read_text(encoding="utf-8").split("```")[1]
    named = set(re.findall(r"\w+", shown))
    modules = [path for package in PACKAGES for path in Path(package).glob("*.py") if path.stem != "__init__"]
    assert [str(path) for path in modules if path.stem not in named] == []


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    places = ("*.md", "docs/*.md", "docs/adr/*.md", "models/pretrained/*/*.md")
    pages = [page for place in places for page in Path().glob(place)]
    broken = []
    for page in pages:
        for link in re.findall(r"\]\(([^):\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page}: {link}")
    assert pages
    assert broken == []
