"""What one fused pass works on: stacked copies of the adapters' weights, and fresh rows for the new gradients.

Gradients land in staging first and reach a job's own row only when the pass is known to be good, so a pass that fails
half-way leaves no trace.

    J  jobs of one layout      P  parameters      R  rank      I, O  widths of a linear map
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mainspring_workers.adapters import Adapter, Layout
from mainspring_workers.plan import Run


class Slab:
    """The adapters of one layout in a pass.

    Attributes:
        a, b: by index of the target: A [J, R, I] and alpha/R · B [J, O, R], copies in the base model's dtype. The
            scaling is folded into B once, so that no layer has to multiply by it.
        grad_a, grad_b: float32 views of `staged`, to be added to.
    """

    def __init__(self, layout: Layout, adapters: Sequence[Adapter], dtype: torch.dtype) -> None:
        self.layout = layout
        self.adapters = adapters
        weights = torch.stack([adapter.weights for adapter in adapters])  # [J, P]
        self.staged = torch.zeros_like(weights)
        for j, adapter in enumerate(adapters):
            weights[j, layout.b_start :].mul_(adapter.scaling)
        a_views, b_views = layout.matrices(weights.to(dtype))
        self.a = dict(zip(layout.indices, a_views, strict=True))
        self.b = dict(zip(layout.indices, b_views, strict=True))
        a_views, b_views = layout.matrices(self.staged)
        self.grad_a = dict(zip(layout.indices, a_views, strict=True))
        self.grad_b = dict(zip(layout.indices, b_views, strict=True))

    def finish(self) -> None:
        """Undo the folding: B was used as scaling · B, so the gradient of B itself is scaling times what came in."""
        for j, adapter in enumerate(self.adapters):
            self.staged[j, self.layout.b_start :].mul_(adapter.scaling)


class Part:
    """One run of equally long jobs at one linear map: n rows each, [start, end) in all."""

    __slots__ = ("a", "b", "end", "grad_a", "grad_b", "jobs", "start")

    def __init__(self, slab: Slab, index: int, run: Run) -> None:
        self.start, self.end = run.start, run.end
        self.jobs = run.last - run.first
        # A single job gets plain matrices: mm is faster than a bmm over a batch of one.
        jobs = slice(run.first, run.last) if self.jobs > 1 else run.first
        self.a, self.b = slab.a[index][jobs], slab.b[index][jobs]
        self.grad_a, self.grad_b = slab.grad_a[index][jobs], slab.grad_b[index][jobs]

    def rows(self, x: Tensor) -> Tensor:
        """This run's rows of `x` [T, D], as a view: [n, D], or [J, n, D] when there are several jobs."""
        rows = x[self.start : self.end]
        return rows if self.jobs == 1 else rows.view(self.jobs, -1, x.shape[1])


class Work:
    """The LoRA work of one micro-batch: which rows meet which adapters."""

    def __init__(self, slabs: Sequence[Slab], runs: Sequence[Run]) -> None:
        self._slabs = slabs
        self._runs = runs

    def touches(self, index: int) -> bool:
        """Whether any job of the micro-batch has LoRA on target `index`."""
        return any(index in self._slabs[run.group].a for run in self._runs)

    def parts(self, index: int) -> Iterator[Part]:
        """The runs that have LoRA on target `index`."""
        for run in self._runs:
            slab = self._slabs[run.group]
            if index in slab.a:
                yield Part(slab, index, run)


def add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out += left @ right, for matrices or batches of them; `out` may be of a wider dtype or a strided view."""
    if out.dim() == 2 and out.dtype == left.dtype:
        out.addmm_(left, right)
    elif out.dtype == left.dtype and out.is_contiguous():
        out.baddbmm_(left, right)
    else:  # baddbmm_ on a strided batch would fall back to a loop
        out.add_(left @ right)
