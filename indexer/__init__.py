"""Corpus in, snapshot out: the offline half of the search."""
