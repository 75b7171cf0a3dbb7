"""The search path: a parsed request to the bytes of its answer."""
