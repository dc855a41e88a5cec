"""Every bad request is refused with an error that says which datum, which position, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mainspring_broker import errors
from mainspring_broker.wire import ForwardBackward, Init, Jagged, OptimStep
from mainspring_workers import losses
from mainspring_workers.losses import ConfigKey, Loss
from mainspring_workers.validate import check_forward_backward, check_init, check_optim_step
from tests.tiny import batch, jagged, random_datums

VOCAB, MAX_LENGTH = 61, 16


def good() -> ForwardBackward:
    return batch(random_datums(0, [4, 6, 5]))


def check(op: ForwardBackward) -> Any:
    return check_forward_backward(op, vocab_size=VOCAB, max_length=MAX_LENGTH)


def with_input(name: str, values: Jagged) -> ForwardBackward:
    op = good()
    return replace(op, inputs={**op.inputs, name: values})


def with_value(name: str, flat: int, value: float) -> ForwardBackward:
    """The good batch with one value of the tokens or of an input changed."""
    op = good()
    old = op.tokens if name == "tokens" else op.inputs[name]
    values = old.values.copy()
    values[flat] = value
    new = Jagged(values, old.lengths)
    return replace(op, tokens=new) if name == "tokens" else with_input(name, new)


# Flat place 11 is datum 2, position 1.
BAD: dict[str, tuple[Callable[[], ForwardBackward], type[errors.MainspringError], dict[str, Any], str]] = {
    "unknown loss": (lambda: replace(good(), loss_fn="crossentropy"), errors.UnknownLoss, {}, "cross_entropy"),
    "unknown setting": (
        lambda: replace(good(), loss_config={"tau": 1.0}),
        errors.InvalidLossConfig,
        {"field": "tau"},
        "no setting 'tau'",
    ),
    "missing input": (
        lambda: replace(good(), inputs={}),
        errors.MissingLossInput,
        {"field": "target_tokens"},
        "target_tokens",
    ),
    "unknown input": (
        lambda: with_input("advantages", good().inputs["weights"]),
        errors.UnknownLossInput,
        {"field": "advantages"},
        "allowed: target_tokens, weights",
    ),
    "no datum": (lambda: replace(batch([]), inputs=batch([]).inputs), errors.EmptyBatch, {}, "at least one"),
    "empty datum": (
        lambda: batch(random_datums(0, [4, 0, 5])),
        errors.EmptyDatum,
        {"datum": 1, "limit": 1},
        "datum 1 has no token",
    ),
    "too long": (
        lambda: batch(random_datums(0, [4, 17])),
        errors.SequenceTooLong,
        {"datum": 1, "limit": 16},
        "datum 1 has 17 tokens; the model takes at most 16",
    ),
    "too few rows": (
        lambda: with_input("weights", jagged([np.ones(4, np.float32), np.ones(6, np.float32)])),
        errors.LengthMismatch,
        {"datum": 2},
        "has 2 rows; there are 3 datums",
    ),
    "a row too short": (
        lambda: with_input("weights", jagged([np.ones(n, np.float32) for n in (4, 5, 5)])),
        errors.LengthMismatch,
        {"datum": 1, "position": 5, "limit": 6},
        "datum 1: input weights has 5 values; its 6 tokens need 6",
    ),
    "token too large": (
        lambda: with_value("tokens", 11, 61),
        errors.TokenOutOfRange,
        {"datum": 2, "position": 1, "limit": 61},
        "datum 2, position 1: token 61 is outside the vocabulary; allowed is 0 to 60",
    ),
    "token negative": (
        lambda: with_value("tokens", 0, -100),
        errors.TokenOutOfRange,
        {"datum": 0, "position": 0},
        "token -100",
    ),
    "target too large": (
        lambda: with_value("target_tokens", 3, 1000),
        errors.TokenOutOfRange,
        {"datum": 0, "position": 3},
        "target token 1000",
    ),
    "target negative": (
        lambda: with_value("target_tokens", 4, -1),
        errors.TokenOutOfRange,
        {"datum": 1, "position": 0},
        "or -100 to ignore",
    ),
    "weight NaN": (
        lambda: with_value("weights", 11, math.nan),
        errors.NonFiniteInput,
        {"datum": 2, "position": 1},
        "datum 2, position 1: input weights is nan",
    ),
    "weight infinite": (
        lambda: with_value("weights", 14, -math.inf),
        errors.NonFiniteInput,
        {"datum": 2, "position": 4},
        "-inf",
    ),
    "weight too large for float32": (
        lambda: with_input("weights", Jagged(np.full(15, 1e300), good().tokens.lengths)),
        errors.NonFiniteInput,
        {"datum": 0, "position": 0},
        "finite",
    ),
    "targets not integers": (
        lambda: with_input("target_tokens", good().inputs["weights"]),
        errors.PayloadInvalid,
        {"field": "target_tokens"},
        "integers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_refused_with_the_place(name: str) -> None:
    make, kind, details, words = BAD[name]
    with pytest.raises(kind) as caught:
        check(make())
    assert type(caught.value) is kind
    assert words in caught.value.message
    assert details.items() <= caught.value.details.items()


def test_a_good_batch_comes_back_with_defaults_filled_in() -> None:
    op = good()
    checked = check(replace(op, inputs={"target_tokens": op.inputs["target_tokens"]}))
    assert (checked.inputs["weights"] == 1).all()
    assert checked.counted == int((op.inputs["target_tokens"].values != -100).sum())
    assert checked.tokens.dtype == checked.targets.dtype == np.int64


def test_the_longest_datum_and_the_last_token_are_allowed() -> None:
    op = batch(random_datums(0, [MAX_LENGTH]))
    check(op)
    check(with_value("tokens", 0, VOCAB - 1))


def test_token_count_leaves_out_ignored_and_weightless_positions() -> None:
    op = replace(
        good(),
        tokens=Jagged(np.arange(4, dtype=np.int32), np.array([4], np.int32)),
        inputs={
            "target_tokens": jagged([np.array([1, -100, 2, 3], np.int32)]),
            "weights": jagged([np.array([1, 1, 0, -0.5], np.float32)]),
        },
    )
    assert check(op).counted == 2


def test_settings_of_a_loss_have_defaults_and_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Loss(losses.cross_entropy, optional={"weights": 1.0}, config={"clip": ConfigKey(0.2, 0.0, 1.0)})
    monkeypatch.setitem(losses.LOSSES, "clipped", loss)
    op = replace(good(), loss_fn="clipped")
    assert check(op).config == (("clip", 0.2),)
    assert check(replace(op, loss_config={"clip": 1})).config == (("clip", 1.0),)
    for value in (1.5, -0.1, math.nan, "0.2", True, None):
        with pytest.raises(errors.InvalidLossConfig, match="clip"):
            check(replace(op, loss_config={"clip": value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-9),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("beta2", math.nan),
        ("eps", 0.0),
        ("eps", 1e-60),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("weight_decay", math.inf),
        ("grad_clip_norm", -1.0),
        ("grad_clip_norm", math.nan),
    ],
)
def test_settings_of_a_step_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(errors.InvalidHyperparameter, match=field) as caught:
        check_optim_step(replace(OptimStep(), **{field: value}))
    assert caught.value.details["field"] == field


def test_edges_of_a_steps_settings_are_allowed() -> None:
    check_optim_step(OptimStep())
    check_optim_step(OptimStep(learning_rate=0.0, beta1=0.0, beta2=0.0, eps=1e-30, grad_clip_norm=1e300))


@pytest.mark.parametrize(
    ("init", "field"),
    [
        (Init(rank=0, seed=0), "rank"),
        (Init(rank=257, seed=0), "rank"),
        (Init(rank=-8, seed=0), "rank"),
        (Init(rank=8, seed=-1), "seed"),
        (Init(rank=8, seed=2**63), "seed"),
        (Init(rank=8, seed=0, alpha=math.nan), "alpha"),
        (Init(rank=8, seed=0, alpha=0.0), "alpha"),
        (Init(rank=8, seed=0, train_attn=False, train_mlp=False, train_unembed=False), "train_attn"),
    ],
)
def test_a_bad_init_is_refused(init: Init, field: str) -> None:
    with pytest.raises(errors.InvalidHyperparameter) as caught:
        check_init(init)
    assert caught.value.details["field"] == field


def test_edges_of_init_are_allowed() -> None:
    check_init(Init(rank=1, seed=0))
    check_init(Init(rank=256, seed=2**63 - 1))
