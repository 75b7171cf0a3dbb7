"""The benchmark's dry run: each of our parts runs and says what it measured. The peer is left to `--tiny` by hand."""

import pytest

from models.bench.train import main


def test_the_dry_run_measures_stage_one_and_lora(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--parts", "stage-1", "lora"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(("CPU", "NVIDIA"))
    told = [line.partition(":")[0] for line in lines[1:]]
    assert told == ["  256³", "caching pass", "stage-1", "stage-1", "lora"]
    assert "pairs/s" in lines[3]
    assert "peak" in lines[5]
