"""Updates of what is served: new snapshots, and documents posted or deleted while the service runs."""
