"""What can go wrong with a measurement itself, as opposed to what it measures."""

from __future__ import annotations


class BenchError(Exception):
    """A measurement that cannot be made; the message is one line that says what to do next."""


class BadQueries(BenchError):
    """A file of queries that cannot be used."""
