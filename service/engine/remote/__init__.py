"""The engine in a process of its own: the client in each worker, the server, and their protocol."""
