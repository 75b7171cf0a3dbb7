"""Data for training and benchmarks: steps that read and write JSON lines (`care curate`)."""
