"""The search path: from a parsed request to the bytes of its response."""
