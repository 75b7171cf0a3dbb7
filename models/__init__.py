"""Encoders: run, train, export and evaluate them. Inference needs no torch."""

import os

# Queries are medical: nothing about them may leave the machine. ONNX Runtime reads this when it is imported, which
# nothing in here does before this line.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
