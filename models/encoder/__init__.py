"""Encoders: their description, tokens, and how ONNX Runtime or torch runs them."""
