"""A frozen linear map with the LoRA of many jobs: the base product for all rows at once, LoRA per run of jobs.

    y = x Wᵀ + bias,   then for the rows of each job   y += (x Aᵀ) (s·B)ᵀ,   s = alpha / R

    T  rows (tokens)      I, O  input and output width      R  rank      J, n  jobs of a run and rows of each

Backward, with h = x Aᵀ saved and dh = dy (s·B):

    dx = dy W + dh A        dA += dhᵀ x        d(s·B) += dyᵀ h

dA and dB are added straight to the staging rows, so autograd never sees them: cost and memory go with the jobs that
are in the micro-batch, not with those that exist. Rows are selected by slicing, never masked by multiplying: a
neighbour's NaN cannot cross over (0 · NaN is NaN).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mainspring_workers.staging import Part, Work, add_product


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
        if work is None or not work.touches(self.index):
            return F.linear(x, self.weight, self.bias)
        parts = list(work.parts(self.index))
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
            h = part.rows(rows) @ part.a.mT  # [n, R] or [J, n, R]
            add_product(part.rows(y), h, part.b.mT)
            hidden.append(h)
        ctx.parts = parts
        ctx.save_for_backward(x, weight, *hidden)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, weight, *hidden = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        dy = grads[0].reshape(-1, weight.shape[0]).contiguous()  # [T, O]
        dx = dy @ weight if ctx.needs_input_grad[0] else None  # [T, I]
        for part, h in zip(ctx.parts, hidden, strict=True):
            dy_part = part.rows(dy)
            dh = dy_part @ part.b  # [n, R] or [J, n, R]
            add_product(part.grad_b, dy_part.mT, h)
            add_product(part.grad_a, dh.mT, part.rows(rows))
            if dx is not None:
                add_product(part.rows(dx), dh, part.a)
        return (None if dx is None else dx.view_as(x)), None, None, None, None
