"""Queries in batches to rankings: the batcher, and the engine that runs a batch."""
