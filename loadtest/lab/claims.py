"""`make claims`: reruns what docs/reliability.md and docs/benchmarks.md claim, and fails if a claim no longer holds.

  python -m loadtest.lab.claims              every claim of claims.toml, and every test that docs/reliability.md names
  python -m loadtest.lab.claims swaps peers  only the claims whose name contains one of these words
  python -m loadtest.lab.claims --list       what there is

A claim is a command that must end with status 0 and, optionally, a figure that it prints. The published text must be in
the document that the claim names (tested). Limits are those of the documents, not the published figures, because
machines differ. A claim that names a `machine` (x86_64, aarch64) holds for that kind of CPU alone.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.harness import REPOSITORY
from loadtest.harness.report import Program, table

CLAIMS = Path(__file__).with_name("claims.toml")
RELIABILITY = REPOSITORY / "docs" / "reliability.md"
TEST_FILE = re.compile(r"`((?:tests/[\w/]+/)?test_[\w*]+\.py)`")
# Two files at a time: tests are not timed. One thread each, as in `make test`.
PYTEST = "env OMP_NUM_THREADS=1 python -m pytest --numprocesses 2"
LIMIT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim; `figure` is an expression whose first group is the number, the worst match counts.

    `machine` is the kind of processor that it is made for, None: any.
    """

    name: str
    document: str
    published: str
    command: str
    figure: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    machine: str | None = None

    @property
    def is_for_this_machine(self) -> bool:
        return self.machine in (None, platform.machine())

    def judge(self, output: str, status: int) -> tuple[str, bool]:
        """Returns what was measured, and whether the claim holds."""
        if self.figure is None:
            return ("holds" if status == 0 else f"exit status {status}"), status == 0
        found = [float(number.replace(",", "")) for number in re.findall(self.figure, output)]
        if not found:
            return f"no figure in the output (exit status {status})", False
        worst = max(found) if self.at_most is not None else min(found)
        low, high = self.at_least, self.at_most
        kept = (low is None or worst >= low) and (high is None or worst <= high)
        limit = f"at least {low:g}" if low is not None else f"at most {high:g}"
        return f"{worst:g} ({limit})" + (f", exit status {status}" if status else ""), kept and status == 0


def read_claims() -> list[Claim]:
    """Reads the claims of claims.toml, and one for the tests that docs/reliability.md names and no other claim runs."""
    written = [Claim(**facts) for facts in tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claim"]]
    commands = " ".join(claim.command for claim in written).split()
    named = (str(path.relative_to(REPOSITORY)) for path in reliability_tests())
    command = f"{PYTEST} {' '.join(test for test in named if test not in commands)}"
    return [*written, Claim("the other tests of docs/reliability.md", "docs/reliability.md", "", command)]


def reliability_tests() -> list[Path]:
    """Returns the test files that docs/reliability.md names; a name without a folder is looked for in all."""
    found: set[Path] = set()
    for name in TEST_FILE.findall(RELIABILITY.read_text(encoding="utf-8")):
        paths = [*REPOSITORY.glob(name)] if "/" in name else [*(REPOSITORY / "tests").rglob(name)]
        if not paths:
            raise FileNotFoundError(f"docs/reliability.md names {name}, which is not there; correct the document")
        found.update(paths)
    return sorted(found)


def run(claims: Sequence[Claim]) -> bool:
    """Runs each command once and prints a row for each claim; returns whether all hold."""
    print(table("claim | published | measured | holds | seconds", []).rstrip(), flush=True)
    all_hold = True
    for command in dict.fromkeys(claim.command for claim in claims):
        began = time.monotonic()
        output, status = _run(command)
        seconds = f"{time.monotonic() - began:.0f}"
        for claim in claims:
            if claim.command == command:
                measured, holds = claim.judge(output, status)
                all_hold &= holds
                verdict = "yes" if holds else "NO"
                print(f"| {claim.name} | {claim.published} | {measured} | {verdict} | {seconds} |", flush=True)
                if not holds:
                    print("\n".join(output.splitlines()[-15:]), file=sys.stderr, flush=True)
    return all_hold


def _run(command: str) -> tuple[str, int]:
    # `python` is the interpreter of this environment, also inside a shell.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    how = {"cwd": REPOSITORY, "env": os.environ | {"PATH": path}, "capture_output": True, "text": True}
    try:
        done = subprocess.run(shlex.split(command), timeout=LIMIT_SECONDS, **how)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired as late:
        printed = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        return f"{printed}\nended after {LIMIT_SECONDS:.0f} s", 124
    return done.stdout + done.stderr, done.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Program("claims", "loadtest.lab.claims", __doc__)
    parser.add_argument("words", nargs="*", help="only the claims whose name contains one of these words")
    parser.add_argument("--list", action="store_true", help="print the claims and run nothing")
    options = parser.parse_args(arguments)
    claims = [one for one in read_claims() if not options.words or any(word in one.name for word in options.words)]
    if options.list:
        for claim in claims:
            print(f"{claim.name}: {claim.command}" + ("" if claim.is_for_this_machine else f" (on {claim.machine})"))
        return 0
    claims = [claim for claim in claims if claim.is_for_this_machine]
    if not claims:
        parser.error("no claim has one of these words in its name; --list shows all")
    began = time.monotonic()
    all_hold = run(claims)
    print(f"\n{'All claims hold' if all_hold else 'Some claims no longer hold'}; {time.monotonic() - began:.0f} s")
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
