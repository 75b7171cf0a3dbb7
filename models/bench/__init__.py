"""Benchmarks of encoding and training on a GPU: `make bench-encode`, `make bench-train`."""
