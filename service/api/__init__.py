"""The HTTP routes. Each one validates, calls the core and writes bytes."""
