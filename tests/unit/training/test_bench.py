"""The training benchmark's dry run: each of our parts reports a measurement. The peer is run by hand with `--tiny`."""

import pytest

from models.bench.train import main


def test_the_dry_run_measures_stage_one_and_lora(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--parts", "stage-1", "lora"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(("CPU", "NVIDIA"))
    names = [line.partition(":")[0] for line in lines[1:]]
    assert names == ["  256³", "caching pass", "stage-1", "stage-1", "lora"]
    assert "pairs/s" in lines[3]
    assert "peak" in lines[5]
