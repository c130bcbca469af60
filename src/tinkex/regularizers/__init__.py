"""User-defined losses: a base loss plus weighted regularizers, computed on the client in PyTorch.

    pipeline = Pipeline([RegularizerSpec(Entropy(mode="maximize"), 0.01, "entropy")])
    output = pipeline.compute(data, logprobs, loss_fn)

The same specs work in training: `TrainingClient.forward_backward_custom(data, loss_fn, regularizers=[…])`.
Names, and with them torch, are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex._lazy import lazy_names

if TYPE_CHECKING:
    from tinkex.types import BaseLossOutput as BaseLossOutput
    from tinkex.types import CustomLossOutput as CustomLossOutput
    from tinkex.types import RegularizerOutput as RegularizerOutput
    from tinkex.types import RegularizerSpec as RegularizerSpec

    from .divergences import Consistency as Consistency
    from .divergences import Entropy as Entropy
    from .divergences import JensenShannon as JensenShannon
    from .divergences import KLDivergence as KLDivergence
    from .errors import CustomLossError as CustomLossError
    from .errors import CustomLossTimeoutError as CustomLossTimeoutError
    from .executor import Executor as Executor
    from .geometry import GradientPenalty as GradientPenalty
    from .geometry import Orthogonality as Orthogonality
    from .gradients import grad_norm as grad_norm
    from .magnitudes import L1 as L1
    from .magnitudes import L2 as L2
    from .magnitudes import ElasticNet as ElasticNet
    from .magnitudes import OutputMagnitude as OutputMagnitude
    from .pipeline import Evaluation as Evaluation
    from .pipeline import Pipeline as Pipeline
    from .pipeline import grad_norm_for_regularizer as grad_norm_for_regularizer
    from .pipeline import total_grad_norm as total_grad_norm
    from .protocol import Logprobs as Logprobs
    from .protocol import LossFn as LossFn
    from .protocol import Regularizer as Regularizer
    from .tensors import joined as joined

# The module of each name. Type checkers read the block above instead.
_NAMES = {
    "tinkex.types": "BaseLossOutput CustomLossOutput RegularizerOutput RegularizerSpec",
    ".divergences": "Consistency Entropy JensenShannon KLDivergence",
    ".errors": "CustomLossError CustomLossTimeoutError",
    ".executor": "Executor",
    ".geometry": "GradientPenalty Orthogonality",
    ".gradients": "grad_norm",
    ".magnitudes": "L1 L2 ElasticNet OutputMagnitude",
    ".pipeline": "Evaluation Pipeline grad_norm_for_regularizer total_grad_norm",
    ".protocol": "Logprobs LossFn Regularizer",
    ".tensors": "joined",
}
if not TYPE_CHECKING:  # to a type checker `__getattr__` means that every name exists
    __all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
