"""The processes of a service: supervisor, HTTP server, engine."""
