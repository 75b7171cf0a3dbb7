"""Engine in its own process: the client in each worker, the server, and their protocol."""
