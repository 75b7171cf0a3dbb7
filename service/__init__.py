"""The online half: HTTP in, ranked hits out. `service.app.create_app` builds it."""
