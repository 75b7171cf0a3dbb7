"""Indexer, the offline half of the search: builds snapshots from a corpus."""
