"""Adam with decoupled weight decay on one adapter's row.

One call per job that steps: its learning rate, betas, eps, decay and step count are its own, and no operation ever
spans two jobs' states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw

from mainspring_broker.errors import NonFiniteGradient
from mainspring_broker.wire import OptimStep
from mainspring_workers.adapters import Adapter

MAX_NORM = 1e18  # a larger gradient squared overflows float32 in the second moment, which would stay infinite


def optim_step(adapter: Adapter, op: OptimStep) -> dict[str, Any]:
    """Apply one step to the adapter's weights; the gradient is left to be cleared by the caller.

        g ← g · min(1, clip / (‖g‖ + 1e-6))                      if clip > 0, as torch.nn.utils.clip_grad_norm_
        w ← w − lr · λ · w                                       Loshchilov & Hutter 2019, algorithm 2
        m ← β1 m + (1 − β1) g        v ← β2 v + (1 − β2) g²
        w ← w − lr · (m / (1 − β1ᵗ)) / (√(v / (1 − β2ᵗ)) + eps)     Kingma & Ba 2015, algorithm 1

    Returns:
        grad_norm: ‖g‖ over all of the adapter, before clipping; step: t; learning_rate: as used.

    Raises:
        NonFiniteGradient: the norm (after clipping) is not finite or above 1e18. Nothing was changed.
    """
    norm = torch.linalg.vector_norm(adapter.grad, dtype=torch.float64).item()
    clipped = min(norm, op.grad_clip_norm) if op.grad_clip_norm > 0 else norm
    if not (clipped <= MAX_NORM and norm < float("inf")):
        raise NonFiniteGradient(f"the gradient's norm is {norm:.3g}: nothing was applied", limit=MAX_NORM)
    if op.grad_clip_norm > 0:
        adapter.grad.mul_(min(1.0, op.grad_clip_norm / (norm + 1e-6)))
    adamw(
        [adapter.weights],
        [adapter.grad],
        [adapter.exp_avg],
        [adapter.exp_avg_sq],
        [],
        [adapter.step],
        fused=True,
        amsgrad=False,
        beta1=op.beta1,
        beta2=op.beta2,
        lr=op.learning_rate,
        weight_decay=op.weight_decay,
        eps=op.eps,
        maximize=False,
    )
    return {"grad_norm": norm, "step": int(adapter.step.item()), "learning_rate": op.learning_rate}
