"""Export of a trained encoder to the ONNX graphs that are served: a backbone, a head, three variants."""
