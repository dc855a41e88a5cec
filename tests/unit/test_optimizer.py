"""The optimizer step equals torch.optim.AdamW with that job's own settings."""

from __future__ import annotations

import math

import pytest
import torch

from mainspring_broker.errors import NonFiniteGradient
from mainspring_broker.wire import Init, OptimStep
from mainspring_workers.adapters import Adapter, AdapterPool, Target
from mainspring_workers.optimizer import optim_step

SETTINGS = [
    OptimStep(),
    OptimStep(learning_rate=1e-2, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.3),
    OptimStep(learning_rate=1e-3, grad_clip_norm=0.7, weight_decay=0.01),
    OptimStep(learning_rate=1e-3, grad_clip_norm=1e6),
    OptimStep(learning_rate=0.0),
]


def make_adapter(job: str = "a") -> Adapter:
    targets = [Target("layers.0.q_proj", "q_proj", "attn", 16, 24, 0)]
    pool = AdapterPool(targets, slots=9, device=torch.device("cpu"))
    return pool.open(job, Init(rank=4, seed=1, train_mlp=False, train_unembed=False))


@pytest.mark.parametrize("op", SETTINGS)
def test_twenty_steps_equal_adamw(op: OptimStep) -> None:
    torch.manual_seed(0)
    adapter = make_adapter()
    parameter = torch.nn.Parameter(adapter.weights.clone())
    reference = torch.optim.AdamW(
        [parameter],
        lr=op.learning_rate,
        betas=(op.beta1, op.beta2),
        eps=op.eps,
        weight_decay=op.weight_decay,
        foreach=False,
    )
    for step in range(1, 21):
        gradient = torch.randn_like(adapter.grad)
        adapter.grad.copy_(gradient)
        parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([parameter], op.grad_clip_norm or math.inf)
        reference.step()
        metrics = optim_step(adapter, op)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        assert metrics["step"] == step
        assert metrics["learning_rate"] == op.learning_rate
    assert float((adapter.weights - parameter.detach()).abs().max()) <= 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25])
def test_a_gradient_that_adam_cannot_hold_changes_nothing(bad: float) -> None:
    adapter = make_adapter()
    adapter.grad.fill_(1.0)
    optim_step(adapter, OptimStep())
    before = adapter.rows.clone()
    adapter.grad[3] = bad
    with pytest.raises(NonFiniteGradient, match="norm"):
        optim_step(adapter, OptimStep())
    assert adapter.step == 1
    for row in (0, 2, 3):
        assert adapter.rows[row].equal(before[row])


def test_clipping_tames_a_huge_gradient() -> None:
    adapter = make_adapter()
    adapter.grad[3] = 1e25
    optim_step(adapter, OptimStep(grad_clip_norm=1.0))
    assert bool(torch.isfinite(adapter.rows).all())


def test_a_zero_gradient_with_the_default_eps_is_no_division_by_zero() -> None:
    adapter = make_adapter()
    before = adapter.weights.clone()
    optim_step(adapter, OptimStep())
    assert adapter.weights.equal(before)
