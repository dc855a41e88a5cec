"""What one fused pass works on: stacked copies of the adapters' weights, and fresh rows for the new gradients.

Gradients land in staging first and reach a job's own row only when the pass is known to be good, so a pass that fails
half-way leaves no trace.

    J  jobs of one layout      P  parameters      R  rank      I, O  widths of a linear map
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mainspring_workers.adapters import Adapter, Layout
from mainspring_workers.plan import Run


class Slab:
    """The adapters of one layout in a pass.

    Attributes:
        a: by index of the first target that reads an input: the A's of all that read it, stacked [J, G·R, I].
        bt: by index of the target: alpha/R · Bᵀ [J, R, O]. The scaling is folded into B once, so that no layer has to
            multiply by it. Both are copies in the base model's dtype.
        grad_a, grad_bt: float32 views of `staged`, to be added to.
    """

    def __init__(self, layout: Layout, adapters: Sequence[Adapter], dtype: torch.dtype) -> None:
        self.layout = layout
        self.adapters = adapters
        weights = torch.stack([adapter.weights for adapter in adapters])  # [J, P]
        self.staged = torch.zeros_like(weights)
        for j, adapter in enumerate(adapters):
            weights[j, layout.b_start :].mul_(adapter.scaling)
        self.a, self.bt = layout.stacked(weights.to(dtype))
        self.grad_a, self.grad_bt = layout.stacked(self.staged)

    def finish(self) -> None:
        """Undo the folding: B was used as scaling · B, so the gradient of B itself is scaling times what came in."""
        for j, adapter in enumerate(self.adapters):
            self.staged[j, self.layout.b_start :].mul_(adapter.scaling)


class Part:
    """One run of equally long jobs at the G linear maps that read one input: n rows each, [start, end) in all.

    Attributes:
        a, grad_a: [G·R, I], or [J, G·R, I] when there are several jobs.
        bt, grad_bt: one a linear map, [R, O] or [J, R, O].
    """

    __slots__ = ("_end", "_jobs", "_rank", "_rows", "_start", "a", "bt", "grad_a", "grad_bt")

    def __init__(self, slab: Slab, indices: Sequence[int], run: Run) -> None:
        self._start, self._end = run.start, run.end
        self._jobs = run.last - run.first
        self._rows = (run.end - run.start) // self._jobs
        self._rank = slab.layout.rank
        # A single job gets plain matrices: mm is faster than a bmm over a batch of one.
        jobs = slice(run.first, run.last) if self._jobs > 1 else run.first
        self.a, self.grad_a = slab.a[indices[0]][jobs], slab.grad_a[indices[0]][jobs]
        self.bt = [slab.bt[index][jobs] for index in indices]
        self.grad_bt = [slab.grad_bt[index][jobs] for index in indices]

    def rows(self, x: Tensor) -> Tensor:
        """This run's rows of `x` [T, D], as a view: [n, D], or [J, n, D] when there are several jobs."""
        if self._end - self._start != x.shape[0]:
            x = x[self._start : self._end]
        return x if self._jobs == 1 else x.view(self._jobs, self._rows, x.shape[1])

    def split(self, ht: Tensor) -> Sequence[Tensor]:
        """`ht` [G·R, n] or [J, G·R, n], one piece of R a linear map."""
        return (ht,) if len(self.bt) == 1 else torch.split(ht, self._rank, -2)


class Work:
    """The LoRA work of one micro-batch: which rows meet which adapters."""

    def __init__(self, slabs: Sequence[Slab], runs: Sequence[Run]) -> None:
        self._runs = [(slabs[run.group], run) for run in runs]

    def parts(self, indices: Sequence[int]) -> list[Part]:
        """The runs that have LoRA on the targets `indices`, which read the same input."""
        return [Part(slab, indices, run) for slab, run in self._runs if indices[0] in slab.a]


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, for two matrices or two batches; says directly what `matmul` takes five operations to find out."""
    return torch.mm(left, right) if left.dim() == 2 else torch.bmm(left, right)


def add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left @ right, for matrices or batches of them; `out` may be of a wider dtype or a strided view."""
    if out.dtype != left.dtype:
        out.add_(product(left, right))
    elif out.dim() == 2:
        out.addmm_(left, right)
    elif out.is_contiguous():
        out.baddbmm_(left, right)
    else:  # baddbmm_ on a strided batch would fall back to a loop
        out.add_(torch.bmm(left, right))
