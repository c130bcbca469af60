"""Going on when a run is lost: its state saved now and then, watched, and restored from the last checkpoint.

A service that dies and comes back needs none of this: tinkex's own brings every run back as it was, and clients wait
meanwhile. This is for the run that a service itself calls corrupted.

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
