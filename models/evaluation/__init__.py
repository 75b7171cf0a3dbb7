"""Evaluation of rankings: sets, metrics, and the systems to compare."""
