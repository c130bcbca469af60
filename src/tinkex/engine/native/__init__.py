"""Kernels in C, compiled on the user's machine if it has a compiler; never needed."""

from .kernels import NativeKernels, kernels_for
from .products import NativeProducts

__all__ = ["NativeKernels", "NativeProducts", "kernels_for"]
