"""The online service: answers HTTP requests with ranked hits. `service.http.app.create_app` builds it."""
