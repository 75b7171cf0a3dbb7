"""Encoders: their description, their tokenizer, and inference by ONNX Runtime or torch."""
