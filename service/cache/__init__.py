"""Cache of results and embeddings: in the process, then in Redis."""
