"""The service: serves HTTP requests with the engine. Does not import torch."""
