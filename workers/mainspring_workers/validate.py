"""The authoritative checks of a request against the model. Every message says where, what, and what is allowed.

Indices of datums and positions count from 0. Checks are vectorised: no Python loop over tokens or datums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainspring_broker.errors import (
    EmptyBatch,
    EmptyDatum,
    InvalidHyperparameter,
    InvalidLossConfig,
    LengthMismatch,
    MissingLossInput,
    NonFiniteInput,
    PayloadInvalid,
    SequenceTooLong,
    TokenOutOfRange,
    UnknownLoss,
    UnknownLossInput,
)
from mainspring_broker.wire import ForwardBackward, Init, Jagged, OptimStep
from mainspring_workers.losses import LOSSES, Loss

IGNORED = -100  # a target of this value takes no part: no log-probability, no loss, no gradient
MAX_RANK = 256
MIN_EPS = float(np.finfo(np.float32).tiny)  # below it eps is 0 in float32
MAX_SETTING = 1e30  # larger learning rates, alphas, … overflow float32 as soon as they multiply anything


@dataclass(frozen=True, slots=True)
class Batch:
    """A checked forward or forward_backward, with defaults filled in. T tokens in all, N datums."""

    tokens: NDArray[np.int64]  # [T]
    lengths: NDArray[np.int32]  # [N]
    targets: NDArray[np.int64]  # [T], IGNORED or a token
    inputs: Mapping[str, NDArray[np.float32]]  # [T] each: the loss's inputs but the targets
    loss_fn: str
    config: tuple[tuple[str, float], ...]  # every setting of the loss, sorted
    counted: int  # positions with a target whose weight, if the loss has weights, is not 0

    def datum_of(self, flat: int) -> int:
        """The datum in which a place of the flat arrays lies."""
        return _place(flat, self.lengths)[0]


def check_forward_backward(op: ForwardBackward, *, vocab_size: int, max_length: int) -> Batch:
    """The batch that the model can compute.

    Raises:
        UnknownLoss, InvalidLossConfig, MissingLossInput, UnknownLossInput: the loss and what it takes.
        EmptyBatch, EmptyDatum, SequenceTooLong: no datum; one without a token; one longer than `max_length`.
        LengthMismatch: an input with another number of datums, or another length than its datum.
        TokenOutOfRange: a token, or a target other than -100, not in [0, vocab_size).
        NonFiniteInput: NaN or infinity in an input (after conversion to float32).
        PayloadInvalid: arrays of a wrong kind (only when the operation was not decoded from the wire).
    """
    loss = LOSSES.get(op.loss_fn)
    if loss is None:
        known = ", ".join(sorted(LOSSES))
        raise UnknownLoss(f"there is no loss function {op.loss_fn[:100]!r}; known are {known}", allowed=sorted(LOSSES))
    config = _check_config(op.loss_fn, loss, op.loss_config)
    lengths = _check_lengths(op.tokens, max_length)  # first: a batch without a datum has no inputs either
    _check_names(op.loss_fn, loss, op.inputs)
    for name, values in op.inputs.items():
        _check_same_lengths(name, values, lengths)
    tokens = _integers("tokens", op.tokens)
    _check_range("token", tokens, lengths, vocab_size, tokens < 0)
    targets = _integers("target_tokens", op.inputs["target_tokens"])
    _check_range("target token", targets, lengths, vocab_size, (targets < 0) & (targets != IGNORED))
    inputs = {name: _floats(name, values, lengths) for name, values in op.inputs.items() if name != "target_tokens"}
    for name, default in loss.optional.items():
        if name not in inputs:
            inputs[name] = np.full(len(tokens), default, np.float32)
    counts = targets != IGNORED
    if "weights" in inputs:
        counts = counts & (inputs["weights"] != 0)
    return Batch(tokens, lengths, targets, inputs, op.loss_fn, config, int(counts.sum()))


def check_init(init: Init) -> None:
    """Raises InvalidHyperparameter unless rank is 1..256, alpha in (0, 1e30], seed in [0, 2**63), a flag is on."""
    if not 1 <= init.rank <= MAX_RANK:
        raise InvalidHyperparameter(f"rank is {init.rank}; allowed is 1 to {MAX_RANK}", field="rank", limit=MAX_RANK)
    if not 0 <= init.seed < 2**63:
        raise InvalidHyperparameter(f"seed is {init.seed}; allowed is 0 to 2**63 - 1", field="seed")
    if not 0 < init.alpha <= MAX_SETTING:  # False for NaN, too
        raise InvalidHyperparameter(f"alpha is {init.alpha}; it must be above 0 and finite", field="alpha")
    if not (init.train_attn or init.train_mlp or init.train_unembed):
        message = "train_attn, train_mlp and train_unembed are all off: there would be nothing to train"
        raise InvalidHyperparameter(message, field="train_attn")


def check_optim_step(step: OptimStep) -> None:
    """Raises InvalidHyperparameter unless every setting is in its range.

    eps must be above 0 (at least 1.2e-38, the smallest normal float32): a fresh adapter has B = 0 and therefore a
    gradient of exactly 0 for A, and Adam without eps makes 0/0 of it.
    """
    _check_setting("learning_rate", step.learning_rate, 0.0 <= step.learning_rate <= MAX_SETTING, "0 or more")
    for name, value in (("beta1", step.beta1), ("beta2", step.beta2)):
        _check_setting(name, value, 0.0 <= value < 1.0, "0 or more and below 1")
    _check_setting("eps", step.eps, MIN_EPS <= step.eps <= MAX_SETTING, f"at least {MIN_EPS:.2g}")
    _check_setting("weight_decay", step.weight_decay, 0.0 <= step.weight_decay <= MAX_SETTING, "0 or more")
    _check_setting("grad_clip_norm", step.grad_clip_norm, 0.0 <= step.grad_clip_norm < math.inf, "0 (off) or more")


def _check_setting(name: str, value: float, good: bool, allowed: str) -> None:
    if not good:
        raise InvalidHyperparameter(f"{name} is {value}; it must be {allowed} and finite", field=name)


def _check_config(name: str, loss: Loss, given: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    config = {key: spec.default for key, spec in loss.config.items()}
    for key, value in given.items():
        spec = loss.config.get(key)
        if spec is None:
            allowed = ", ".join(sorted(loss.config)) or "none"
            message = f"loss {name} has no setting {str(key)[:100]!r}; allowed: {allowed}"
            raise InvalidLossConfig(message, field=str(key)[:100], allowed=sorted(loss.config))
        if type(value) not in (int, float) or not spec.low <= value <= spec.high:
            message = f"setting {key} of loss {name} is {str(value)[:100]}; allowed: {spec.low} to {spec.high}"
            raise InvalidLossConfig(message, field=str(key), limit=[spec.low, spec.high])
        config[key] = float(value)
    for lower, upper in pairwise(loss.ascending):
        if config[lower] > config[upper]:
            message = f"setting {lower} of loss {name} is {config[lower]}, above {upper}, which is {config[upper]}"
            raise InvalidLossConfig(message, field=lower, limit=config[upper])
    return tuple(sorted(config.items()))


def _check_names(name: str, loss: Loss, inputs: Mapping[str, Jagged]) -> None:
    required = ("target_tokens", *loss.required)
    for missing in required:
        if missing not in inputs:
            message = f"loss {name} needs the input {missing}; given: {', '.join(sorted(inputs))[:200] or 'none'}"
            raise MissingLossInput(message, field=missing)
    for unknown in sorted(inputs.keys() - {*required, *loss.optional}):
        allowed = ", ".join((*required, *loss.optional))
        message = f"loss {name} does not know the input {unknown[:100]!r}; allowed: {allowed}"
        raise UnknownLossInput(message, field=unknown[:100], allowed=[*required, *loss.optional])


def _check_lengths(tokens: Jagged, max_length: int) -> NDArray[np.int32]:
    lengths = tokens.lengths
    if len(lengths) == 0:
        raise EmptyBatch("the batch has no datum; at least one is needed", limit=1)
    if int(lengths.min()) <= 0:
        datum = int(np.argmax(lengths <= 0))
        raise EmptyDatum(f"datum {datum} has no token; at least one is needed", datum=datum, limit=1)
    if int(lengths.max()) > max_length:
        datum = int(np.argmax(lengths > max_length))
        message = f"datum {datum} has {int(lengths[datum])} tokens; the model takes at most {max_length}"
        raise SequenceTooLong(message, datum=datum, position=max_length, limit=max_length)
    if int(lengths.sum(dtype=np.int64)) != len(tokens.values):
        raise PayloadInvalid("the lengths of tokens do not add up to its values")
    return lengths


def _check_same_lengths(name: str, jagged: Jagged, lengths: NDArray[np.int32]) -> None:
    if len(jagged.lengths) != len(lengths):
        message = f"input {name} has {len(jagged.lengths)} rows; there are {len(lengths)} datums"
        raise LengthMismatch(message, datum=min(len(jagged.lengths), len(lengths)), field=name, limit=len(lengths))
    differs = jagged.lengths != lengths
    if differs.any():
        datum = int(np.argmax(differs))
        expected, got = int(lengths[datum]), int(jagged.lengths[datum])
        message = f"datum {datum}: input {name} has {got} values; its {expected} tokens need {expected}"
        raise LengthMismatch(message, datum=datum, position=min(expected, got), field=name, limit=expected)
    if len(jagged.values) != int(lengths.sum(dtype=np.int64)):
        raise PayloadInvalid(f"the lengths of {name} do not add up to its values")


def _integers(name: str, jagged: Jagged) -> NDArray[np.int64]:
    if jagged.values.dtype.kind != "i":
        raise PayloadInvalid(f"{name} must be integers, got {jagged.values.dtype}", field=name)
    return jagged.values.astype(np.int64)


def _check_range(
    what: str, values: NDArray[np.int64], lengths: NDArray[np.int32], vocab_size: int, negative: NDArray[np.bool_]
) -> None:
    bad = negative | (values >= vocab_size)
    if bad.any():
        flat = int(np.argmax(bad))
        datum, position = _place(flat, lengths)
        ignored = f" (or {IGNORED} to ignore the position)" if what != "token" else ""
        message = (
            f"datum {datum}, position {position}: {what} {int(values[flat])} is outside the vocabulary; "
            f"allowed is 0 to {vocab_size - 1}{ignored}"
        )
        raise TokenOutOfRange(message, datum=datum, position=position, limit=vocab_size)


def _floats(name: str, jagged: Jagged, lengths: NDArray[np.int32]) -> NDArray[np.float32]:
    if jagged.values.dtype.kind not in "fiub":
        raise PayloadInvalid(f"{name} must be numbers, got {jagged.values.dtype}", field=name)
    with np.errstate(over="ignore"):  # a float64 that does not fit becomes infinity, which is refused below
        values = jagged.values.astype(np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        flat = int(np.argmin(finite))
        datum, position = _place(flat, lengths)
        message = f"datum {datum}, position {position}: input {name} is {values[flat]}; it must be finite"
        raise NonFiniteInput(message, datum=datum, position=position, field=name)
    return values


def _place(flat: int, lengths: NDArray[np.int32]) -> tuple[int, int]:
    """(datum, position within it) of a place in the flat array."""
    ends = np.cumsum(lengths, dtype=np.int64)
    datum = int(np.searchsorted(ends, flat, side="right"))
    return datum, flat - int(ends[datum] - lengths[datum])
