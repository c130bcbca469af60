"""The engine: token ids in, numbers out."""
