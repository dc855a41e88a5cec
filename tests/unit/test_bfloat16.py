"""A bfloat16 base model with float32 adapters: the same training, but for bfloat16's three digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mainspring_broker.wire import Init
from mainspring_workers.base_model import BaseModel
from tests.tiny import FAMILIES, Driver, batch, optim, random_episodes, tiny_model

JOBS = {"a": Init(rank=8, seed=1), "b": Init(rank=4, seed=2, train_unembed=False), "c": Init(rank=8, seed=3)}
LENGTHS = {"a": (17, 9, 12), "b": (20, 13), "c": (17, 9, 12)}
LOSS = {"a": "cross_entropy", "b": "ppo", "c": "cispo"}


def driver(family: str, dtype: torch.dtype, **changes: Any) -> Driver:
    """With equal base weights for both dtypes: what bfloat16 can hold."""
    model = tiny_model(family, **changes).to(torch.bfloat16).to(dtype)
    found = Driver(BaseModel(model, name="tiny", path="tiny"))
    found.good(*JOBS.items())
    return found


def requests(seed: int) -> list[tuple[str, Any]]:
    found = []
    for job, loss_fn in LOSS.items():
        datums = random_episodes(seed, LENGTHS[job])
        if loss_fn == "cross_entropy":
            datums = [type(d)(d.tokens, d.targets, d.weights) for d in datums]
        # A ratio beside a bound may fall on either side of it, and then the gradient of PPO is another one.
        found.append((job, batch(datums, loss_fn, {"clip_high_threshold": 50.0} if loss_fn == "ppo" else None)))
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_and_losses_agree_to_bfloat16s_digits(family: str, tied: bool) -> None:
    full, half = (driver(family, dtype, tied=tied) for dtype in (torch.float32, torch.bfloat16))
    for each in (full, half):  # B is no longer 0, so that A has a gradient
        each.good(*requests(0), *[(job, optim(1e-2, eps=1e-3)) for job in JOBS])
    for job in JOBS:  # and both are at the same place
        half.adapter(job).weights.copy_(full.adapter(job).weights)
    expected, found = full.good(*requests(1)), half.good(*requests(1))
    for job, mine, theirs in zip(JOBS, found, expected, strict=True):
        assert mine["metrics"]["loss_mean"] == pytest.approx(theirs["metrics"]["loss_mean"], rel=1e-2, abs=1e-2), job
        gradient, exact = half.adapter(job).grad, full.adapter(job).grad
        assert gradient.dtype == torch.float32
        assert float((gradient - exact).norm() / exact.norm()) <= 0.04, job  # found: 0.008 to 0.027


@pytest.mark.parametrize("family", FAMILIES)
def test_ten_updates_end_at_about_the_same_loss(family: str) -> None:
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        each = driver(family, dtype)
        for _ in range(10):
            results = each.good(*requests(0), *[(job, optim(3e-3, eps=1e-3)) for job in JOBS])
        ends.append([results[i]["metrics"]["loss_mean"] for i in range(len(JOBS))])
        assert all(each.adapter(job).rows.dtype == torch.float32 for job in JOBS)
    assert ends[1] == pytest.approx(ends[0], rel=0.03)
