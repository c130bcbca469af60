"""What is raised when a loss or a regularizer of one's own cannot be used."""

from __future__ import annotations

from tinkex.errors import InvalidInputError

__all__ = ["CustomLossError", "CustomLossTimeoutError"]


class CustomLossError(InvalidInputError):
    """A function raised, or returned what nothing can be trained on.

    `name` is the regularizer's, or None for the loss itself; `field` is `regularizers.<name>` or `loss_fn`.
    What the function raised is the `__cause__`.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message, field="loss_fn" if name is None else f"regularizers.{name}")
        self.name = name


class CustomLossTimeoutError(CustomLossError):
    """A function did not return in time; nobody waits for it any more."""
