"""Adapters: what a fresh one holds, who shares what (nothing), and what is left of a closed one (nothing)."""

from __future__ import annotations

import math

import pytest
import torch

from mainspring_broker.errors import InvalidHyperparameter, OutOfMemory
from mainspring_broker.wire import Init
from mainspring_workers.adapters import AdapterPool, Target

TARGETS = [
    Target("layers.0.q_proj", "q_proj", "attn", 16, 24, 0),
    Target("layers.0.up_proj", "up_proj", "mlp", 16, 40, 1),
    Target("lm_head", "lm_head", "unembed", 16, 50, 2),
]


def make_pool(slots: int = 4, targets: list[Target] = TARGETS) -> AdapterPool:
    return AdapterPool(targets, slots=slots, device=torch.device("cpu"))


def test_a_is_uniform_within_one_over_sqrt_of_the_input_width_and_b_is_zero() -> None:
    adapter = make_pool().open("a", Init(rank=64, seed=3))
    for target in TARGETS:
        a, b = adapter.named_matrices[target.name]
        bound = 1 / math.sqrt(target.d_in)
        assert a.shape == (64, target.d_in)
        assert b.shape == (target.d_out, 64)
        assert float(a.abs().max()) <= bound
        assert float(a.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert not b.any()
    assert not adapter.rows[1:].any()
    assert adapter.parameters == 64 * (3 * 16 + 24 + 40 + 50)


def test_the_start_depends_on_the_seed_alone() -> None:
    pool, other = make_pool(), make_pool()
    pool.open("first", Init(rank=4, seed=1))
    mine = pool.open("mine", Init(rank=8, seed=7))
    assert mine.weights.equal(other.open("elsewhere", Init(rank=8, seed=7)).weights)
    assert not mine.weights.equal(other.open("elsewhere", Init(rank=8, seed=8)).weights)


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    make_pool().open("a", Init(rank=8, seed=1))
    assert before.equal(torch.get_rng_state())


def test_flags_choose_the_targets() -> None:
    adapter = make_pool().open("a", Init(rank=2, seed=0, train_attn=False, train_unembed=False))
    assert list(adapter.named_matrices) == ["layers.0.up_proj"]


def test_a_flag_that_matches_nothing_is_refused() -> None:
    pool = make_pool(targets=TARGETS[:1] + TARGETS[2:])
    with pytest.raises(InvalidHyperparameter, match="train_mlp") as caught:
        pool.open("a", Init(rank=2, seed=0))
    assert caught.value.details["field"] == "train_mlp"
    assert "a" not in pool


def test_closing_wipes_the_rows_and_frees_the_slot() -> None:
    pool = make_pool(slots=1)
    adapter = pool.open("a", Init(rank=2, seed=0))
    with pytest.raises(OutOfMemory, match="all 1 adapter slots"):
        pool.open("b", Init(rank=2, seed=0))
    pool.close("a")
    assert "a" not in pool
    assert not adapter.rows.any()
    pool.open("b", Init(rank=2, seed=0))
    pool.close("never there")


def test_opening_again_starts_afresh() -> None:
    pool = make_pool(slots=1)
    adapter = pool.open("a", Init(rank=2, seed=0))
    adapter.weights.add_(1)
    adapter.step.add_(5)
    fresh = pool.open("a", Init(rank=2, seed=0))
    assert fresh.step == 0
    assert fresh.weights.equal(make_pool().open("a", Init(rank=2, seed=0)).weights)
