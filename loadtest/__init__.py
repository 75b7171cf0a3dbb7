"""Load tests and benchmarks of a running service, over HTTP only."""
