"""The service: HTTP in, engine out. Knows nothing of torch."""
