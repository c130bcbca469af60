"""Recovery of lost runs: save their state regularly, watch them, and restore them from the last checkpoint.

A service that crashes and restarts needs none of this: the tinkex service restores every run itself, and clients
wait meanwhile. Recovery is for a run that the service reports as corrupted.

    >>> policy = RecoveryPolicy(enabled=True, on_recovery=lambda old, new, checkpoint: ...)
    >>> service = tinkex.ServiceClient(recovery=policy)
    >>> training = service.create_lora_training_client("tinkex/tiny")
    >>> with AutoCheckpoint(training, every_steps=50), RecoveryMonitor(RecoveryExecutor()) as monitor:
    ...     restored = monitor.monitor_run(training, service)
    ...     try:
    ...         train(training)
    ...     except tinkex.RequestFailedError:
    ...         train(restored.result().client)
"""

from __future__ import annotations

from .autosave import AutoCheckpoint, Saved
from .executor import RecoveryExecutor, Restored
from .monitor import RecoveryMonitor
from .policy import RecoveryError, RecoveryPolicy

__all__ = [
    "AutoCheckpoint",
    "RecoveryError",
    "RecoveryExecutor",
    "RecoveryMonitor",
    "RecoveryPolicy",
    "Restored",
    "Saved",
]
