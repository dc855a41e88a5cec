"""A loss of the user's own, computed here and turned into weights of the built-in one.

A loss L(p) of the log-probabilities p of all targets has the same gradient for the adapter as the linear loss Σ g·p with
g = dL/dp held fixed. That is cross_entropy (−Σ w·p) with the weights w = −g. So: `forward` for p, autograd for g on this
machine, `forward_backward` with w. The gradient is exact, whatever L couples: pairs, groups, the whole batch.

The one file of the client, beside `TensorData.torch`, that needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mainspring.types import Datum, ForwardBackwardOutput
from mainspring_broker.errors import NonFiniteInput

if TYPE_CHECKING:
    import torch

LossFunction = Callable[[list[Datum], "list[torch.Tensor]"], "tuple[torch.Tensor, Mapping[str, float]]"]

TARGETS, WEIGHTS = "target_tokens", "weights"


@dataclass(frozen=True, slots=True)
class Linear:
    """A custom loss at one point: its value, and a batch whose cross_entropy has the same gradient."""

    batch: list[Datum]
    loss: float
    metrics: dict[str, float]  # the user's

    def output(self, trained: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """The result for the user: log-probabilities from the service, the loss from here."""
        count = trained.metrics["token_count"]
        counted = {"loss_mean": self.loss / count if count else 0.0, "token_count": count}
        return ForwardBackwardOutput(trained.loss_fn_outputs, {**counted, **self.metrics, "loss_sum": self.loss})


def to_score(data: Sequence[Datum] | Any) -> Any:
    """The batch as `forward` needs it. Other inputs stay here: they are for the loss function.

    What is no batch of datums comes back as it is, for `forward` to refuse.
    """
    if not isinstance(data, Sequence):
        return data
    return [_only(datum, {}) if isinstance(datum, Datum) else datum for datum in data]


def linearize(data: Sequence[Datum], scored: ForwardBackwardOutput, loss_fn: LossFunction) -> Linear:
    """Call `loss_fn(data, logprobs)` and differentiate its loss.

    Args:
        scored: the result of `forward` on `to_score(data)`.
        loss_fn: gets the data and, for each datum, a float32 leaf tensor [length]; gives a scalar tensor and metrics.

    Raises:
        TypeError, ValueError: `loss_fn` gave something else, or a loss that does not depend on the log-probabilities.
        NonFiniteInput: the loss or its gradient is NaN or infinite.
        Whatever `loss_fn` raises.
    """
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        logprobs = [torch.from_numpy(row["logprobs"].numpy()).requires_grad_() for row in scored.loss_fn_outputs]
        loss, metrics = _checked(loss_fn(list(data), logprobs))
        loss.backward()  # type: ignore[no-untyped-call]
    weights = [
        np.zeros(len(leaf), np.float32) if leaf.grad is None else np.negative(leaf.grad.numpy()) for leaf in logprobs
    ]
    _check_finite(loss.item(), weights)
    batch = [_only(datum, {WEIGHTS: row}) for datum, row in zip(data, weights, strict=True)]
    return Linear(batch, loss.item(), metrics)


def _only(datum: Datum, inputs: Mapping[str, NDArray[np.float32]]) -> Datum:
    """The datum with its targets and `inputs`."""
    targets = {name: value for name, value in datum.loss_fn_inputs.items() if name == TARGETS}
    return Datum(datum.model_input, {**targets, **inputs})


def _checked(given: object) -> tuple[torch.Tensor, dict[str, float]]:
    import torch

    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], Mapping):
        raise TypeError("a custom loss must return (loss, metrics): a scalar tensor and a map of numbers by name")
    loss, metrics = given
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"the loss must be a torch.Tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"the loss must be a scalar, got shape {list(loss.shape)}: sum it")
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on the log-probabilities: was it detached, or made under no_grad?")
    return loss.reshape(()), {str(name): float(value) for name, value in metrics.items()}


def _check_finite(loss: float, weights: Sequence[NDArray[np.float32]]) -> None:
    for index, row in enumerate(weights):
        if not np.isfinite(row).all():
            position = int(np.argmin(np.isfinite(row)))
            message = f"datum {index}, position {position}: the gradient of the custom loss is {-row[position]}"
            raise NonFiniteInput(message, datum=index, position=position)
    if not np.isfinite(loss):
        raise NonFiniteInput(f"the custom loss is {loss}")
