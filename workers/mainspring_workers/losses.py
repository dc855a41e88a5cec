"""Loss functions, each an elementwise function of the log-probability of the target.

Every loss is a **sum** over tokens, never divided by a count, so that requests of one update add up. Because a loss
depends on one log-probability only, the head can form dloss/dlogits while it still holds the logits.

To add one: write `fn(logp, inputs, config) -> (loss, dloss/dlogp)`, all of shape [M] float32, and enter it in LOSSES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

LossFunction = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A setting of a loss: a finite number in [low, high]."""

    default: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and what it takes. `target_tokens` is required by all and named by none."""

    fn: LossFunction
    required: tuple[str, ...] = ()  # float inputs, one value a token
    optional: Mapping[str, float] = field(default_factory=dict)  # float inputs → value where it is not given
    config: Mapping[str, ConfigKey] = field(default_factory=dict)


def cross_entropy(logp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """loss_t = −w_t · log p(target_t), hence dloss_t/dlogp_t = −w_t."""
    minus_w = inputs["weights"].neg()
    return logp * minus_w, minus_w


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, optional={"weights": 1.0}),
}
