"""The backbone graph by torch's own exporter: every architecture that transformers holds natively."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.export.head import HIDDEN

OPSET = 18


class _Backbone(nn.Module):
    """The backbone with positional inputs and one output, as the tracer wants it."""

    def __init__(self, backbone: PreTrainedModel, inputs: list[str]) -> None:
        super().__init__()
        self.backbone = backbone
        self.inputs = inputs

    def forward(self, *tensors: Tensor) -> Tensor:
        output = self.backbone(**dict(zip(self.inputs, tensors, strict=True)))
        hidden: Tensor = output.last_hidden_state
        return hidden


def export_backbone(backbone: PreTrainedModel, path: Path) -> None:
    """Writes the fp32 graph input_ids, attention_mask (, token_type_ids) → last_hidden_state, any batch and length.

    The tracing exporter with eager attention, because only its graphs get ONNX Runtime's Attention fusion. Token
    types are an input where the backbone has them: the embedding fusion looks for it, and the head removes it.
    """
    backbone.set_attn_implementation("eager")
    ids = torch.arange(1, 19).reshape(2, 9) % backbone.config.vocab_size
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    examples = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in inspect.signature(backbone.forward).parameters:
        examples["token_type_ids"] = torch.zeros_like(ids)
    with warnings.catch_warnings():
        # The tracer is deprecated in favour of one without Attention fusion, and remarks on every Python branch;
        # that no branch was frozen wrongly is for the parity check to see, which runs many lengths.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Backbone(backbone, list(examples)).eval(),
            tuple(examples.values()),
            str(path),
            input_names=list(examples),
            output_names=[HIDDEN],
            dynamic_axes={name: {0: "batch", 1: "sequence"} for name in (*examples, HIDDEN)},
            opset_version=OPSET,
            dynamo=False,
        )
