"""How fast an LLM encodes documents, beside the card's own limit and beside sentence-transformers."""
