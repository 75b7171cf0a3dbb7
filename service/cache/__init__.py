"""What was computed before: in this process, and in a Redis that several processes share.

Two kinds of values, kept apart: the finished JSON of one query's result, whose key holds the snapshot, the encoder and
the whole request; and the embedding of one text, whose key holds the encoder and the text's tokens alone, so that
another request, or the next snapshot, finds it. No key outlives its meaning, so a swap needs no flush.

Redis being slow, full, flushed, away or wrong costs a request a few milliseconds and never more: no error of the
cache reaches its caller. Knows nothing of HTTP or of how the values are made.
"""

from service.cache.embeddings import EmbeddingCache
from service.cache.keys import Kind, ResultKeys
from service.cache.layers import Cache

__all__ = ["Cache", "EmbeddingCache", "Kind", "ResultKeys"]
