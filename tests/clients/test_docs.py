"""The examples of docs/clients.md, run unchanged against the real service."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api.support import TOKEN

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"
PRINTED = [
    "氨氯地平",
    "发热处理 Explanation(dense=Placing(rank=1",
    "notice-7",
    "氨氯地平等。",
    "['a-1', ",
    "['a-1', 'a-3']",
    "氨氯地平是",
]


@pytest.mark.parametrize(("example", "printed"), list(zip(EXAMPLES, PRINTED, strict=True)))
def test_an_example_prints_what_the_page_shows(
    example: str, printed: str, service_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARE_ADMIN_TOKEN", TOKEN)
    assert ADDRESS in example
    exec(compile(example.replace(ADDRESS, service_url), "docs/clients.md", "exec"), {"__name__": "__main__"})
    assert printed in capsys.readouterr().out
