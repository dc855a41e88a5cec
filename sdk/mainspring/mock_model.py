"""What the mock trains: a made-up model of one number a pair of tokens. No torch, the same numbers in every run.

    p(target | token) = sigmoid(GAIN · θ[h] − DIFFICULTY[h])        h = hash of (token, target), one of BUCKETS

It knows nothing beyond the pair, but it does learn: what is trained with a positive weight becomes likelier, with a negative
one less so, and what is not trained stays as it was. Losses and Adam are those of the real workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainspring_broker import wire
from mainspring_broker.errors import (
    EmptyBatch,
    EmptyDatum,
    InvalidHyperparameter,
    InvalidLossConfig,
    LengthMismatch,
    MissingLossInput,
    NoGradient,
    NonFiniteGradient,
    NonFiniteInput,
    PayloadInvalid,
    PrecedingRequestFailed,
    SequenceTooLong,
    TokenOutOfRange,
    UnknownLoss,
    UnknownLossInput,
)

Array = NDArray[np.float64]

VOCAB_SIZE = 1 << 18  # room for the token ids of any tokenizer
MAX_LENGTH = 1 << 15
IGNORED = -100
BUCKETS = 4093  # a prime, so that neighbouring ids spread
GAIN = 300.0  # a step of Adam with learning rate 1e-3 then moves a log-probability by about 0.3
DIFFICULTY: Array = 2.0 + 5.0 * np.modf(np.arange(BUCKETS) * 0.6180339887498949)[0]  # nats, the same for ever
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"

_SAMPLED = ("logprobs", "advantages")
# Loss → inputs that it needs, and settings with their defaults.
LOSSES: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "cross_entropy": ((), {}),
    "importance_sampling": (_SAMPLED, {}),
    "ppo": (_SAMPLED, {LOW: 0.8, HIGH: 1.2}),
    "cispo": (_SAMPLED, {LOW: 0.0, HIGH: 4.0}),
    "dro": (_SAMPLED, {"beta": 0.05}),
}


@dataclass(slots=True)
class Model:
    """One job's numbers."""

    parameters: int
    weights: Array = field(default_factory=lambda: np.zeros(BUCKETS))
    moments: Array = field(default_factory=lambda: np.zeros((2, BUCKETS)))
    step: int = 0
    gradient: Array | None = None
    poison: str | None = None  # code of the first failure since the last step

    def compute(self, op: wire.ForwardBackward) -> dict[str, Any]:
        """The result map of a forward or forward_backward. Raises what a worker raises for data that are plainly wrong."""
        inputs, config = check(op)
        targets = op.inputs["target_tokens"].values.astype(np.int64)
        taking_part = targets != IGNORED
        bucket = (op.tokens.values.astype(np.int64) * 8191 + targets * 31 + 7) % BUCKETS
        distance = DIFFICULTY[bucket] - GAIN * self.weights[bucket]
        logp = np.where(taking_part, -np.logaddexp(0.0, distance), 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            loss, dlogp = losses(op.loss_fn, logp, inputs, config)
        loss, dlogp = np.where(taking_part, loss, 0.0), np.where(taking_part, dlogp, 0.0)
        if not (np.isfinite(logp).all() and np.isfinite(loss).all()):
            raise NonFiniteGradient("the computation gave NaN or infinity")
        if op.backward:
            gradient = np.zeros(BUCKETS) if self.gradient is None else self.gradient
            self.gradient = gradient + np.bincount(
                bucket, GAIN * dlogp * -np.expm1(logp), BUCKETS
            )  # dp/dθ = GAIN·(1 − eᵖ)
        counted = int((taking_part & (inputs["weights"] != 0)).sum())
        total = float(loss.sum())
        metrics = {
            "loss_sum": total,
            "loss_mean": total / counted if counted else 0.0,
            "token_count": counted,
        }
        return {"logprobs": logp.astype(np.float32), "lengths": op.tokens.lengths, "metrics": metrics}

    def optim_step(self, op: wire.OptimStep) -> dict[str, Any]:
        """One step of Adam; gradient and poison are gone afterwards, whatever happens."""
        gradient, poison = self.gradient, self.poison
        self.gradient = self.poison = None
        if poison is not None:
            raise PrecedingRequestFailed(f"a forward_backward of this update failed ({poison})", cause=poison)
        for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
            if not 0 <= getattr(op, name) < np.inf:
                raise InvalidHyperparameter(f"{name} is {getattr(op, name)}; it must be 0 or more", field=name)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(op, name) < 1:
                raise InvalidHyperparameter(f"{name} is {getattr(op, name)}; it must be in [0, 1)", field=name)
        if not 0 < op.eps < np.inf:
            raise InvalidHyperparameter(f"eps is {op.eps}; it must be above 0", field="eps")
        if gradient is None:
            raise NoGradient("there is no gradient to apply: submit a forward_backward before the optim_step")
        norm = float(np.linalg.norm(gradient))
        if op.grad_clip_norm:
            gradient = gradient * min(1.0, op.grad_clip_norm / (norm + 1e-6))
        self.step += 1
        first, second = self.moments
        first += (1 - op.beta1) * (gradient - first)
        second += (1 - op.beta2) * (gradient**2 - second)
        bias1, bias2 = 1 - op.beta1**self.step, 1 - op.beta2**self.step
        self.weights *= 1 - op.learning_rate * op.weight_decay
        self.weights -= op.learning_rate * (first / bias1) / (np.sqrt(second / bias2) + op.eps)
        return {"metrics": {"grad_norm": norm, "step": self.step, "learning_rate": op.learning_rate}}


def losses(name: str, p: Array, given: Mapping[str, Array], config: Mapping[str, float]) -> tuple[Array, Array]:
    """(loss, dloss/dp) a token, as in mainspring_workers.losses."""
    w = given["weights"]
    if name == "cross_entropy":
        return -w * p, -w
    q, a = given["logprobs"], given["advantages"]
    if name == "dro":
        pull = config["beta"] * (p - q)
        return -w * (p * a - 0.5 * pull * (p - q)), -w * (a - pull)
    ratio, off = np.exp(p - q), (w == 0) | (a == 0)
    bounded = ratio if name == "importance_sampling" else np.clip(ratio, config[LOW], config[HIGH])
    if name == "cispo":
        slope = np.where(off, 0.0, -w * bounded * a)
        return slope * p, slope
    clipped = np.where(a > 0, bounded < ratio, bounded > ratio)
    loss = np.where(off, 0.0, -w * np.where(clipped, bounded, ratio) * a)
    return loss, np.where(clipped, 0.0, loss)


def check(op: wire.ForwardBackward) -> tuple[dict[str, Array], dict[str, float]]:
    """The inputs, `weights` among them, and the settings of a batch that is not plainly wrong."""
    if op.loss_fn not in LOSSES:
        raise UnknownLoss(f"there is no loss function {op.loss_fn!r}; known are {', '.join(LOSSES)}")
    needed, defaults = LOSSES[op.loss_fn]
    for key, value in op.loss_config.items():
        if key not in defaults or type(value) not in (int, float) or not 0 <= value < np.inf:
            allowed = ", ".join(defaults) or "none"
            raise InvalidLossConfig(
                f"{key}={value!r} is no setting of loss {op.loss_fn}; allowed: {allowed}", field=key
            )
    lengths = op.tokens.lengths
    if not len(lengths):
        raise EmptyBatch("the batch has no datum; at least one is needed")
    for datum, length in enumerate(lengths.tolist()):
        if not length:
            raise EmptyDatum(f"datum {datum} has no token; at least one is needed", datum=datum)
        if length > MAX_LENGTH:
            raise SequenceTooLong(f"datum {datum} has {length} tokens; at most {MAX_LENGTH} are taken", datum=datum)
    for name in ("target_tokens", *needed):
        if name not in op.inputs:
            raise MissingLossInput(f"loss {op.loss_fn} needs the input {name}", field=name)
    for name, rows in op.inputs.items():
        if name not in ("target_tokens", "weights", *needed):
            raise UnknownLossInput(f"loss {op.loss_fn} does not know the input {name!r}", field=name)
        for datum, (got, expected) in enumerate(zip(rows.lengths.tolist(), lengths.tolist(), strict=True)):
            if got != expected:
                message = f"datum {datum}: input {name} has {got} values; its {expected} tokens need {expected}"
                raise LengthMismatch(message, datum=datum, field=name, limit=expected)
        if not np.isfinite(rows.values).all():
            raise NonFiniteInput(f"input {name} has a value that is not finite", field=name)
    if op.inputs["target_tokens"].values.dtype.kind != "i":
        raise PayloadInvalid("target_tokens must be integers", field="target_tokens")
    for what, ids in (("token", op.tokens.values), ("target token", op.inputs["target_tokens"].values)):
        bad = ids[((ids < 0) & ((ids != IGNORED) | (what == "token"))) | (ids >= VOCAB_SIZE)]
        if len(bad):
            raise TokenOutOfRange(f"{what} {bad[0]} is outside the vocabulary", limit=VOCAB_SIZE)
    inputs = {name: rows.values.astype(np.float64) for name, rows in op.inputs.items()}
    return {"weights": np.ones(len(op.tokens.values)), **inputs}, defaults | dict(op.loss_config)
