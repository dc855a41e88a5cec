"""A frozen linear map with the LoRA of many jobs: the base product for all rows at once, LoRA per run of jobs.

    y = x Wᵀ + bias,   then for the rows of each job   y += (x Aᵀ) (s·B)ᵀ,   s = alpha / R

    T  rows (tokens)      I, O  input and output width      R  rank      J, n  jobs of a run and rows of each

Backward, with hᵀ = A xᵀ saved and dhᵀ = (s·B)ᵀ dyᵀ:

    dx = dy W + dh A        dA += dhᵀ x        d(s·B)ᵀ += hᵀ dy

dA and dB are added straight to the staging rows, so autograd never sees them: cost and memory go with the jobs that
are in the micro-batch, not with those that exist. Rows are selected by slicing, never masked by multiplying: a
neighbour's NaN cannot cross over (0 · NaN is NaN).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mainspring_workers.staging import Part, Work, add_product, product


class Context:
    """What the FusedLinears of a model look at: the work of the running micro-batch; None: the plain base model."""

    def __init__(self, device: torch.device) -> None:
        self.work: Work | None = None
        # Makes autograd record the first adapted layer although its input needs no gradient, so that nothing is
        # computed below it.
        self.anchor = torch.zeros((), device=device, requires_grad=True)


class FusedLinear(nn.Module):
    """Takes the place of one `nn.Linear`, whose frozen weight it keeps."""

    def __init__(self, linear: nn.Linear, index: int, context: Context) -> None:
        super().__init__()
        self.weight = linear.weight  # [O, I]
        self.bias = linear.bias  # [O] or None
        self.index = index  # in the model's list of targets
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        work = self.context.work
        parts = work.parts(self.index) if work is not None else []
        if not parts:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = _FusedLoRA.apply(x, self.context.anchor, self.weight, self.bias, parts)  # type: ignore[no-untyped-call]
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


class _FusedLoRA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, parts: list[Part]) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])  # [T, I]
        y = F.linear(rows, weight, bias)  # [T, O]
        hidden = []
        for part in parts:
            ht = product(part.a, part.rows(rows).mT)  # [R, n] or [J, R, n]
            add_product(part.rows(y), ht.mT, part.bt)
            hidden.append(ht)
        ctx.parts = parts
        ctx.save_for_backward(x, weight, *hidden)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, weight, *hidden = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        dy = grads[0].reshape(-1, weight.shape[0]).contiguous()  # [T, O]
        dx = torch.mm(dy, weight) if ctx.needs_input_grad[0] else None  # [T, I]
        for part, ht in zip(ctx.parts, hidden, strict=True):
            dy_part = part.rows(dy)
            dht = product(part.bt, dy_part.mT)  # [R, n] or [J, R, n]
            add_product(part.grad_bt, ht, dy_part)
            add_product(part.grad_a, dht, part.rows(rows))
            if dx is not None:
                add_product(part.rows(dx), dht.mT, part.a)
        return (None if dx is None else dx.view_as(x)), None, None, None, None
