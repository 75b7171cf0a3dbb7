"""The ONNX graph of every architecture gives the states of transformers, also at lengths that were not traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoConfig, AutoModel

from models.errors import ExportError
from models.export.backbone import export_backbone
from tests.unit.models.test_packed_architectures import CASES, SHAPE


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=[f"{kind}-{place}" for place, (kind, _) in enumerate(CASES)])
@torch.no_grad()
def test_a_graph_gives_the_states_of_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SHAPE | changes)
    if len(set(getattr(config, "layer_types", ["all"]))) == 1:  # the third layer would be traced like the second
        config = AutoConfig.for_model(kind, **SHAPE | changes | {"num_hidden_layers": 2})
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(3, 100, (2, 40))
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    expected = model(input_ids=ids, attention_mask=mask).last_hidden_state.numpy()
    export_backbone(model, tmp_path / "model.onnx")
    graph = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    (states,) = graph.run(None, {given.name: inputs[given.name].numpy() for given in graph.get_inputs()})
    real = mask.numpy().astype(bool)
    np.testing.assert_allclose(states[real], expected[real], atol=1e-3)


def test_an_unsupported_operator_is_refused_with_the_name_of_the_architecture(tmp_path: Path) -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    model = AutoModel.from_config(AutoConfig.for_model("qwen3_moe", **SHAPE | experts)).eval()
    with pytest.raises(ExportError, match="cannot export a qwen3_moe"):
        export_backbone(model, tmp_path / "model.onnx")
