"""The backbone graph in fused kernels and half precision, for a GPU."""

from __future__ import annotations

import warnings
from pathlib import Path

from onnx import ModelProto
from onnxruntime.transformers.optimizer import optimize_model
from transformers import PretrainedConfig

from models.export.int8 import quiet


def fuse(backbone: Path, config: PretrainedConfig) -> ModelProto:
    """Fusions by ONNX Runtime, then float16 throughout, hidden states included.

    BERT and XLM-R fuse whole (Attention, EmbedLayerNormalization, SkipLayerNormalization, BiasGelu); others keep
    their attention as it is. The fused attention counts each text's tokens, so texts must be padded on the right.
    """
    with quiet(), warnings.catch_warnings():
        # Mask constants of −3e38 become the smallest half, which masks as well.
        warnings.simplefilter("ignore")
        graph = optimize_model(
            str(backbone),
            model_type="bert",
            num_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
            opt_level=0,
        )
        graph.convert_float_to_float16(keep_io_types=False, use_symbolic_shape_infer=True)
    model: ModelProto = graph.model
    return model
