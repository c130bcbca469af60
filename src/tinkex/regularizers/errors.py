"""Errors about a user's loss or regularizer."""

from __future__ import annotations

from tinkex.errors import InvalidInputError

__all__ = ["CustomLossError", "CustomLossTimeoutError"]


class CustomLossError(InvalidInputError):
    """A function raised an error, or returned a value that cannot be trained on.

    `name` is the regularizer's name, or None for the loss itself; `field` is `regularizers.<name>` or `loss_fn`.
    The function's own exception is the `__cause__`.
    """

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message, field="loss_fn" if name is None else f"regularizers.{name}")
        self.name = name


class CustomLossTimeoutError(CustomLossError):
    """A function did not return in time; its thread is abandoned."""
