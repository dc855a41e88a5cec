"""Each loss and its hand-written gradient against the plain formula under autograd, and where floats run out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from mainspring import mock_model
from mainspring_workers.losses import HIGH, LOSSES, LOW
from tests.oracle import DEFAULTS, plain_loss

CONFIGS: list[tuple[str, dict[str, float]]] = [
    *DEFAULTS.items(),
    ("ppo", {LOW: 0.0, HIGH: 1e30}),
    ("ppo", {LOW: 1.0, HIGH: 1.0}),
    ("ppo", {LOW: 1.5, HIGH: 3.0}),
    ("cispo", {LOW: 0.8, HIGH: 1.2}),
    ("dro", {"beta": 0.0}),
    ("dro", {"beta": 2.5}),
]
each_loss = pytest.mark.parametrize(("name", "config"), CONFIGS)


def tensors(dtype: torch.dtype, **values: float) -> dict[str, Tensor]:
    return {name: torch.tensor([value], dtype=dtype) for name, value in values.items()}


def ours(name: str, config: dict[str, float], p: float, **inputs: float) -> tuple[float, float]:
    """(loss, dloss/dp) of one token in float32."""
    given = tensors(torch.float32, **({"weights": 1.0} | inputs))
    loss, gradient = LOSSES[name].fn(torch.tensor([p]), given, DEFAULTS[name] | config)
    assert loss.dtype == gradient.dtype == torch.float32
    assert loss.shape == gradient.shape == (1,)
    return loss.item(), gradient.item()


def autograd(name: str, config: dict[str, float], p: float, dtype: torch.dtype, **inputs: float) -> tuple[float, float]:
    leaf = torch.tensor([p], dtype=dtype, requires_grad=True)
    loss = plain_loss(name, leaf, tensors(dtype, **({"weights": 1.0} | inputs)), config)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.item(), gradient.item()


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


@each_loss
@given(
    p=floats(-80, 0),
    q=floats(-80, 80),
    a=st.just(0.0) | floats(-1e3, 1e3),
    w=st.just(0.0) | st.just(1.0) | floats(-8, 8),
)
def test_loss_and_gradient_are_those_of_autograd(
    name: str, config: dict[str, float], p: float, q: float, a: float, w: float
) -> None:
    """In float64, where nothing overflows; a hair beside a bound, float32 may be on its other side."""
    bounds = DEFAULTS[name] | config
    ratio = math.exp(p - q)
    if name == "ppo":
        assume(all(abs(ratio - bounds[key]) > 1e-4 * bounds[key] for key in (LOW, HIGH)))
    inputs = {"weights": w} if name == "cross_entropy" else {"weights": w, "logprobs": q, "advantages": a}
    expected = autograd(name, config, p, torch.float64, **inputs)
    found = ours(name, config, p, **inputs)
    size = abs(w) * (abs(p * a) + bounds.get("beta", 0.0) * (p - q) ** 2 + 1)  # dro is a difference of two numbers
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-35 + (1e-6 * size if name == "dro" else 0))


@each_loss
@given(
    p=st.sampled_from([0.0, -1e-30, -5.0, -1e4, -1e30]),
    q=st.sampled_from([3e38, 1e30, 100.0, 0.0, -100.0, -1e4, -1e30, -3e38]),
    a=st.sampled_from([0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 1e30, -3e38]),
    w=st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30]),
)
def test_at_the_ends_of_float32_nothing_is_nan(
    name: str, config: dict[str, float], p: float, q: float, a: float, w: float
) -> None:
    loss, gradient = ours(name, config, p, logprobs=q, advantages=a, weights=w)
    neutral = w == 0 or (a == 0 and name not in ("cross_entropy", "dro"))
    if neutral:
        assert (loss, gradient) == (0, 0)
    elif abs(q) <= 1e4 and abs(p) <= 1e4 and abs(a) <= 1:  # beyond that a product of finite numbers may overflow
        assert not math.isnan(loss)
        assert not math.isnan(gradient)


INFINITE = {"p": -1.0, "logprobs": -200.0}  # their ratio is exp(199): no float32


@pytest.mark.parametrize(
    ("name", "advantage", "loss", "gradient"),
    [
        ("importance_sampling", 0.0, 0.0, 0.0),
        ("importance_sampling", 1.0, -math.inf, -math.inf),
        ("ppo", 2.0, -2.4, 0.0),  # the bound is the smaller branch, and has no gradient
        ("ppo", -2.0, math.inf, math.inf),  # the formula has no bound here
        ("ppo", 0.0, 0.0, 0.0),
        ("cispo", 2.0, 8.0, -8.0),  # 4 · p · A with p = −1
        ("cispo", 0.0, 0.0, 0.0),
    ],
)
def test_a_ratio_that_overflows(name: str, advantage: float, loss: float, gradient: float) -> None:
    found = ours(name, {}, advantages=advantage, **INFINITE)
    assert found == pytest.approx((loss, gradient), rel=1e-6)


def test_a_ratio_that_underflows() -> None:
    tiny = {"p": -200.0, "logprobs": -1.0, "advantages": -2.0}
    assert ours("importance_sampling", {}, **tiny) == (0, 0)
    assert ours("ppo", {}, **tiny) == pytest.approx((1.6, 0))  # 0.8 · 2: clipped from below
    assert ours("cispo", {LOW: 0.5}, **tiny) == pytest.approx((-200.0, 1.0))


@pytest.mark.parametrize("bound", [LOW, HIGH])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_on_a_bound_both_branches_of_ppo_are_equal_and_the_gradient_is_whole(bound: str, advantage: float) -> None:
    config = {LOW: 0.5, HIGH: 2.0, bound: 1.0}
    on = {"p": -3.0, "logprobs": -3.0, "advantages": advantage}
    assert ours("ppo", config, **on) == (-advantage, -advantage)
    assert autograd("ppo", config, dtype=torch.float32, **on) == (-advantage, -advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.5, 1, False), (1.5, -1, True), (0.5, 1, True), (0.5, -1, False), (1.1, 1, True), (0.9, -1, True)],
)
def test_ppo_has_no_gradient_where_the_clipped_branch_is_smaller(ratio: float, advantage: int, moves: bool) -> None:
    _, gradient = ours("ppo", {}, p=-2.0, logprobs=-2.0 - math.log(ratio), advantages=advantage)
    assert gradient == pytest.approx(-ratio * advantage if moves else 0.0)


def test_cispo_keeps_the_gradient_of_a_clipped_token_and_none_goes_through_the_ratio() -> None:
    loss, gradient = ours("cispo", {HIGH: 1.2}, p=-2.0, logprobs=-5.0, advantages=3.0)
    assert (loss, gradient) == pytest.approx((1.2 * 2 * 3, -1.2 * 3))


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_neighbours_that_overflow_leave_a_token_alone(name: str) -> None:
    p = torch.tensor([-1.0, -2.0, -3e38])
    inputs = {
        "logprobs": torch.tensor([-3e38, -2.5, 3e38]),
        "advantages": torch.tensor([-3e38, 0.7, 3e38]),
        "weights": torch.tensor([1.0, 0.5, 1.0]),
    }
    loss, gradient = LOSSES[name].fn(p, inputs, DEFAULTS[name])
    alone = ours(name, {}, p=-2.0, logprobs=-2.5, advantages=0.7, weights=0.5)
    assert (loss[1].item(), gradient[1].item()) == alone


def test_defaults_and_inputs_are_the_documented_ones_and_the_mocks() -> None:
    assert {name: {key: spec.default for key, spec in loss.config.items()} for name, loss in LOSSES.items()} == DEFAULTS
    assert all(loss.optional == {"weights": 1.0} for loss in LOSSES.values())
    assert {name: (loss.required, DEFAULTS[name]) for name, loss in LOSSES.items()} == mock_model.LOSSES


@each_loss
def test_the_mocks_losses_are_the_workers(name: str, config: dict[str, float]) -> None:
    rng = np.random.default_rng(3)
    p, q = -rng.exponential(2.0, 200), -rng.exponential(2.0, 200)
    given: dict[str, Any] = {"weights": rng.normal(size=200), "logprobs": q, "advantages": rng.normal(size=200)}
    given["weights"][:20] = given["advantages"][10:30] = 0
    expected = LOSSES[name].fn(
        torch.from_numpy(p).float(),
        {key: torch.from_numpy(values).float() for key, values in given.items()},
        DEFAULTS[name] | config,
    )
    found = mock_model.losses(name, p, given, DEFAULTS[name] | config)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=2e-5, atol=1e-6)
