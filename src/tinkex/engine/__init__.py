"""The engine: trains and samples models, from token ids to numbers."""
