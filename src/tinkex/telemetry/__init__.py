"""Events, logs, metrics, traces, usage and progress of the client.

Nothing here takes part in the work: the client emits events, and everything in this package subscribes to them.

    >>> tinkex.telemetry.attach(print, tinkex.telemetry.events.QueueStateChange)

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._lazy import lazy_names

if TYPE_CHECKING:
    from . import events as events
    from .bus import attach as attach
    from .bus import detach as detach
    from .calls import metadata as metadata
    from .exceptions import capture_exceptions as capture_exceptions
    from .exceptions import with_telemetry as with_telemetry
    from .forwarding import Forwarder as Forwarder
    from .forwarding import to_mlflow as to_mlflow
    from .forwarding import to_sink as to_sink
    from .forwarding import to_tensorboard as to_tensorboard
    from .forwarding import to_trackio as to_trackio
    from .forwarding import to_wandb as to_wandb
    from .logs import attach_logger as attach_logger
    from .metrics import Metrics as Metrics
    from .otel import OpenTelemetry as OpenTelemetry
    from .reporter import Reporter as Reporter
    from .usage import Prices as Prices
    from .usage import Rates as Rates
    from .usage import Usage as Usage
    from .usage import estimate as estimate

_NAMES = {
    ".bus": "attach detach",
    ".calls": "metadata",
    ".exceptions": "capture_exceptions with_telemetry",
    ".forwarding": "Forwarder to_mlflow to_sink to_tensorboard to_trackio to_wandb",
    ".logs": "attach_logger",
    ".metrics": "Metrics",
    ".otel": "OpenTelemetry",
    ".reporter": "Reporter",
    ".usage": "Prices Rates Usage estimate",
}
if not TYPE_CHECKING:  # to a type checker `__getattr__` means that every name exists
    __all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES, ["events"])
