"""Loss functions, each an elementwise function of the log-probability of the target.

Every loss is a **sum** over tokens, never divided by a count, so that requests of one update add up. Because a loss
depends on one log-probability only, the head can form dloss/dlogits while it still holds the logits.

    p  log-probability of the target now      q  the same when it was sampled (`logprobs`)      r = exp(p − q)
    A  advantage (`advantages`)               w  weight, 1 unless given (`weights`): it multiplies the token's loss

exp overflows float32 where q is far below p, and infinity times 0 is NaN. So a token whose weight or advantage is 0 gets
its 0 by selection, never by multiplying, and a clipped one its bound.

To add one: write `fn(logp, inputs, config) -> (loss, dloss/dlogp)`, all of shape [M] float32, and enter it in LOSSES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

LossFunction = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], tuple[Tensor, Tensor]]

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
LARGEST = 1e30  # of a setting: it still can be multiplied in float32


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
    ascending: tuple[str, ...] = ()  # settings, none of which may be below the one before


def cross_entropy(logp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """loss_t = −w_t · p_t, hence dloss_t/dp_t = −w_t."""
    minus_w = inputs["weights"].neg()
    return logp * minus_w, minus_w


def importance_sampling(
    logp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> tuple[Tensor, Tensor]:
    """loss = −w r A. The gradient goes through r, and dr/dp = r, so it is the loss itself."""
    loss = _scaled(inputs, _ratio(logp, inputs) * inputs["advantages"])
    return loss, loss


def ppo(logp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """loss = −w min(r A, clip(r, low, high) A). No gradient where the clipped branch is the smaller one."""
    ratio, advantages = _ratio(logp, inputs), inputs["advantages"]
    clipped = torch.where(advantages > 0, ratio > config[HIGH], ratio < config[LOW])
    bounded = torch.where(clipped, ratio.clamp(config[LOW], config[HIGH]), ratio)
    loss = _scaled(inputs, bounded * advantages)
    return loss, torch.where(clipped, 0.0, loss)


def cispo(logp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """loss = −w sg(clip(r, low, high)) p A, where sg stops the gradient: it goes through p alone."""
    gradient = _scaled(inputs, _ratio(logp, inputs).clamp(config[LOW], config[HIGH]) * inputs["advantages"])
    return gradient * logp, gradient


def dro(logp: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """loss = −w (p A − beta/2 (p − q)²). An advantage of 0 does not make a token neutral here, only a weight of 0 does."""
    advantages, weights = inputs["advantages"], inputs["weights"]
    distance = logp - inputs["logprobs"]
    pull = config["beta"] * distance
    gain, slope = logp * advantages - 0.5 * pull * distance, advantages - pull
    off = weights == 0
    return torch.where(off, 0.0, -weights * gain), torch.where(off, 0.0, -weights * slope)


def _ratio(logp: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """r; infinite where float32 has no number for it."""
    return torch.exp(logp - inputs["logprobs"])


def _scaled(inputs: Mapping[str, Tensor], gain: Tensor) -> Tensor:
    """−w · gain, where `gain` is a multiple of A: 0 where w or A is 0."""
    weights = inputs["weights"]
    neutral = (weights == 0) | (inputs["advantages"] == 0)
    return torch.where(neutral, 0.0, -weights * gain)


_SAMPLED = ("logprobs", "advantages")
_WEIGHTS = {"weights": 1.0}


def _clip(low: float, high: float) -> dict[str, ConfigKey]:
    return {LOW: ConfigKey(low, 0.0, LARGEST), HIGH: ConfigKey(high, 0.0, LARGEST)}


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, optional=_WEIGHTS),
    "importance_sampling": Loss(importance_sampling, _SAMPLED, _WEIGHTS),
    "ppo": Loss(ppo, _SAMPLED, _WEIGHTS, _clip(0.8, 1.2), (LOW, HIGH)),
    "cispo": Loss(cispo, _SAMPLED, _WEIGHTS, _clip(0.0, 4.0), (LOW, HIGH)),
    "dro": Loss(dro, _SAMPLED, _WEIGHTS, {"beta": ConfigKey(0.05, 0.0, LARGEST)}),
}
