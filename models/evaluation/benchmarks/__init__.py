"""Benchmarks by name: a TOML file each, and how their sets are brought from a folder, from mteb or from a hub."""
