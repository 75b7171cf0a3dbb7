"""How good a ranking is: evaluation sets, metrics, and the systems to compare."""
