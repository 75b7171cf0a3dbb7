"""The search engine: a queue of jobs, and what computes them in batches."""
