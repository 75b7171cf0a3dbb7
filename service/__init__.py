"""The online half: HTTP in, ranked hits out. `service.http.app.create_app` builds it."""
