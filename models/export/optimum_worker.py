"""Exports, optimises or quantises one folder; runs as a program inside the Optimum environment.

    python -I optimum_worker.py export|optimize|quantize SOURCE TARGET

Imports Optimum and nothing of this project, whose packages that environment does not have. `TARGET` is a folder;
the graph in it is `model.onnx`.
"""

from __future__ import annotations

import sys
from pathlib import Path

GRAPH = "model.onnx"
OPSET = 18
FEW = "/few"


def export(source: Path, target: Path) -> None:
    """Exports a transformers folder's backbone: ids, mask and its other inputs → last_hidden_state."""
    from optimum.exporters.onnx import main_export

    main_export(
        str(source),
        target,
        task="feature-extraction",
        # A sentence-transformers folder would be exported with its own pooling inside.
        library_name="transformers",
        opset=OPSET,
        # Validation compares with Optimum's own transformers; the caller compares with the encoder itself.
        do_validation=False,
        local_files_only=True,
    )


def optimize(source: Path, target: Path) -> None:
    """Fuses kernels and halves the precision, for a GPU; level 0 keeps the graph free of this machine's kernels."""
    from optimum.onnxruntime import ORTOptimizer
    from optimum.onnxruntime.configuration import OptimizationConfig

    fusions = OptimizationConfig(
        optimization_level=0, optimize_for_gpu=True, fp16=True, disable_embed_layer_norm_fusion=False
    )
    ORTOptimizer.from_pretrained(source, file_names=[GRAPH]).optimize(fusions, save_dir=target, file_suffix="")


def quantize(source: Path, target: Path) -> None:
    """Dynamic int8: the settings of `models.export.int8.quantize`, which says why.

    ORTQuantizer would also quantise the products of two activations inside attention, which costs accuracy and
    saves no weight, so those are named one by one, with those that are to stay in float.
    """
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantizationMode
    from optimum.onnxruntime import ORTQuantizer
    from optimum.onnxruntime.configuration import QuantizationConfig

    graph = onnx.load(str(source / GRAPH)).graph
    weights = {tensor.name for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    floats = [node.name for node in products if node.input[1] not in weights or node.name.endswith(FEW)]
    settings = QuantizationConfig(
        is_static=False,
        format=QuantFormat.QOperator,
        mode=QuantizationMode.IntegerOps,
        per_channel=True,
        reduce_range=True,
        operators_to_quantize=["MatMul"],
        nodes_to_exclude=floats,
    )
    ORTQuantizer.from_pretrained(source, file_name=GRAPH).quantize(settings, save_dir=target, file_suffix="")


def main() -> None:
    job, source, target = sys.argv[1:]
    {"export": export, "optimize": optimize, "quantize": quantize}[job](Path(source), Path(target))


if __name__ == "__main__":
    main()
