class EngineDeadError(Exception):
    """The process that computes has died."""
