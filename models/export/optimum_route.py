"""Optimum, in an environment of its own: finds its interpreter and hands it folders.

optimum-onnx pins an older transformers, so it cannot share this process's packages (docs/adr/0002-export-split.md).
It only ever reads folders that were written here: safetensors and JSON, never a downloaded checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from models.export.errors import ExportError
from models.transformers_folder import CONFIG_FILE

PYTHON_VARIABLE = "CARE_OPTIMUM_PYTHON"
DEFAULT_PYTHON = Path(__file__).parents[2] / ".venv-optimum" / "bin" / "python"
WORKER = Path(__file__).with_name("optimum_worker.py")
HOW_TO = f"make optimum creates it, or name its interpreter in {PYTHON_VARIABLE}"
TIMEOUT_SECONDS = 3600
# What was seen exported right. Optimum lists many more; GteModel is not among them.
EXPORTS = frozenset({"bert", "roberta", "xlm-roberta", "modernbert", "qwen2", "qwen3"})
OPTIMIZES = EXPORTS - {"qwen2", "qwen3"}


def find_python(given: Path | None = None) -> Path | None:
    """The interpreter of the Optimum environment: as given, as the environment says, else the repository's own."""
    named = given or (Path(value) if (value := os.environ.get(PYTHON_VARIABLE)) else None)
    if named is not None and not named.is_file():
        raise ExportError(f"no Optimum interpreter at {named}: {HOW_TO}")
    return named or (DEFAULT_PYTHON if DEFAULT_PYTHON.is_file() else None)


def write_backbone(backbone: PreTrainedModel, folder: Path) -> None:
    """Writes the backbone for Optimum's transformers: safetensors and a configuration in its dialect."""
    backbone.save_pretrained(folder)
    values = json.loads((folder / CONFIG_FILE).read_bytes())
    (folder / CONFIG_FILE).write_text(json.dumps(older_dialect(values), indent=2), encoding="utf-8")


def write_graph_config(config: PretrainedConfig, folder: Path) -> None:
    """Lays the configuration beside a graph: Optimum's tools read the number of heads and the width from it."""
    text = json.dumps(older_dialect(config.to_dict()), indent=2)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def older_dialect(values: dict[str, Any]) -> dict[str, Any]:
    """A transformers 5 configuration as transformers 4 reads it, where rotary settings had names of their own.

    Left as it is, transformers 4 would ignore them and silently use its defaults.
    """
    values = dict(values)
    rope = values.pop("rope_parameters", None)
    if rope is None:
        return values
    if "full_attention" in rope:
        scaled = [part for part in rope.values() if part["rope_type"] != "default"]
        values["global_rope_theta"] = rope["full_attention"]["rope_theta"]
        values["local_rope_theta"] = rope["sliding_attention"]["rope_theta"]
    else:
        scaled = [rope] if rope["rope_type"] != "default" else []
        values["rope_theta"] = rope["rope_theta"]
    if scaled:
        raise ExportError(f"Optimum's transformers cannot scale rotary positions by {scaled[0]!r}: use backend torch")
    return values


def run_worker(python: Path, job: str, source: Path, target: Path) -> None:
    """One job of `optimum_worker`: export, optimize or quantize."""
    command = [str(python), "-I", str(WORKER), job, str(source), str(target)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, env=offline, timeout=TIMEOUT_SECONDS)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ExportError(f"Optimum could not {job} the encoder ({last}): use backend torch") from error
    except subprocess.TimeoutExpired as error:
        raise ExportError(f"Optimum took more than {TIMEOUT_SECONDS} s to {job} the encoder") from error
