"""HTTP: the protocol, the application and its routes."""
