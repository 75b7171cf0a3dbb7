"""Results and embeddings of earlier requests: in the process, then in Redis."""
