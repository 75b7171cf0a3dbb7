"""From a trained encoder to the ONNX graphs that are served: one backbone graph, one head, three variants."""
