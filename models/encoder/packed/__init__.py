"""Transformer encoders without padding: the tokens of many documents in one run, on a GPU or a CPU.

Needs torch. The indexer imports it by name, and only for a folder that has weights and no ONNX graph.
"""
