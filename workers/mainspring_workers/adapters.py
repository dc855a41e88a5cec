"""The LoRA adapters of many jobs: one contiguous float32 row per job for each of weights, gradient and Adam moments.

A row, not modules: clearing, norm, clipping, Adam, wiping and copying are each one operation on contiguous memory,
and nothing of another job lies in it, so that the isolation of optimizer states is a matter of structure.

    P  parameters of an adapter      R  rank      I, O  input and output width of a target
    row [P] = A of every target [R, I], in the model's order, then Bᵀ of every target [R, O]

B lies transposed, so that all products of a pass have the narrow side R first, which BLAS runs twice as fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mainspring_broker.errors import InvalidHyperparameter, MainspringError, OutOfMemory
from mainspring_broker.wire import Init


@dataclass(frozen=True, slots=True)
class Target:
    """A linear map of the base model that a LoRA can be put on."""

    name: str  # dotted, as in the model
    suffix: str  # end of the name that all targets of this sort share, e.g. "q_proj"
    kind: str  # "attn", "mlp" or "unembed": the Init flag that switches it on
    d_in: int
    d_out: int
    reads: int  # targets of the same number stand side by side and read the same input


class Layout:
    """Where the matrices of an adapter lie in its row; shared by all jobs of one rank and one set of flags."""

    def __init__(self, key: tuple[int, bool, bool, bool], targets: Sequence[Target]) -> None:
        _, attn, mlp, unembed = key
        wanted = {kind for kind, on in (("attn", attn), ("mlp", mlp), ("unembed", unembed)) if on}
        self.key = key  # rank and flags: sorts layouts, and equal keys mean equal layouts
        self.rank = key[0]
        self.indices = [i for i, target in enumerate(targets) if target.kind in wanted]  # in the model's target list
        self.targets = [targets[i] for i in self.indices]
        self.a_shapes = [(self.rank, target.d_in) for target in self.targets]
        self.bt_shapes = [(self.rank, target.d_out) for target in self.targets]
        self.b_start = sum(math.prod(shape) for shape in self.a_shapes)
        self.size = self.b_start + sum(math.prod(shape) for shape in self.bt_shapes)

        # Targets that read the same input, as lists of indices in the model's list.
        self.readers: list[list[int]] = []
        for index, target in zip(self.indices, self.targets, strict=True):
            if self.readers and targets[self.readers[-1][0]].reads == target.reads:
                self.readers[-1].append(index)
            else:
                self.readers.append([index])

    def matrices(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of all A [..., R, I] and all Bᵀ [..., R, O] in `rows` [..., P], in target order."""
        shapes = self.a_shapes + self.bt_shapes
        parts = torch.split(rows, [math.prod(shape) for shape in shapes], dim=-1)
        views = [part.view(*rows.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]
        return views[: len(self.targets)], views[len(self.targets) :]

    def named(self, row: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Views of `row` [P]: target name → (A [R, I], B [O, R])."""
        a_views, bt_views = self.matrices(row)
        names = [target.name for target in self.targets]
        return {name: (a, bt.mT) for name, a, bt in zip(names, a_views, bt_views, strict=True)}

    def row(self, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """The row [P], on the CPU, of which `named` gives `matrices`.

        Raises:
            ValueError: other targets or shapes than this layout's; it says which.
        """
        row = torch.empty(self.size)
        views = self.named(row)
        if matrices.keys() != views.keys():
            name = min(matrices.keys() ^ views.keys())
            raise ValueError(f"{name} is {'missing' if name in views else 'not adapted here'}")
        for name, pair in views.items():
            for letter, view, values in zip("AB", pair, matrices[name], strict=True):
                if values.shape != view.shape:
                    raise ValueError(f"{letter} of {name} is {list(values.shape)}, needed is {list(view.shape)}")
                view.copy_(values)
        return row

    def stacked(self, rows: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Views of the A's of each input's readers [..., G·R, I] by the first one's index, and of Bᵀ by index."""
        _, bt_views = self.matrices(rows)
        widths = {index: target.d_in for index, target in zip(self.indices, self.targets, strict=True)}
        shapes = [(len(readers) * self.rank, widths[readers[0]]) for readers in self.readers]
        parts = torch.split(rows[..., : self.b_start], [math.prod(shape) for shape in shapes], dim=-1)
        views = [part.view(*rows.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]
        firsts = [readers[0] for readers in self.readers]
        return dict(zip(firsts, views, strict=True)), dict(zip(self.indices, bt_views, strict=True))


@dataclass(frozen=True, slots=True)
class Poison:
    """Why the pending gradient must not be applied."""

    seq: int  # of the request that failed
    error: MainspringError


class Adapter:
    """One job's adapter: its weights, its pending gradient, its optimizer state.

    Attributes:
        weights, grad, exp_avg, exp_avg_sq: float32 rows [P].
        step: optimizer steps applied so far, a float32 scalar tensor (the form that the fused Adam counts in).
        has_gradient: a forward_backward succeeded since the last optim_step.
        poison: the first failure since the last optim_step, if any.
    """

    def __init__(self, job: str, layout: Layout, init: Init, device: torch.device) -> None:
        self.job = job
        self.layout = layout
        self.init = init
        self.scaling = init.alpha / init.rank  # of B A x, as in LoRA (Hu et al. 2021, section 4.1)
        self.rows = torch.zeros(4, layout.size, device=device)
        self.weights, self.grad, self.exp_avg, self.exp_avg_sq = self.rows.unbind(0)
        self.step = torch.zeros((), device=device)
        self.has_gradient = False
        self.poison: Poison | None = None
        self._draw()

    def _draw(self) -> None:
        """A uniform in ±1/sqrt(I) (PEFT's kaiming_uniform with a = sqrt 5), B zero.

        Drawn on the CPU from the job's own generator in target order, so that neither device nor slot nor
        neighbours play a part.
        """
        generator = torch.Generator().manual_seed(self.init.seed)
        a_views, _ = self.layout.matrices(self.weights)
        for view in a_views:
            bound = 1.0 / math.sqrt(view.shape[-1])
            view.copy_(torch.empty(view.shape).uniform_(-bound, bound, generator=generator))

    @property
    def parameters(self) -> int:
        """Number of trainable values, P."""
        return self.layout.size

    @cached_property
    def named_matrices(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Views of the weights: target name → (A [R, I], B [O, R])."""
        return self.layout.named(self.weights)

    def poison_with(self, seq: int, error: MainspringError) -> None:
        """Make the next optim_step fail because of `seq`; the first cause is the one that is kept."""
        self.poison = self.poison or Poison(seq, error)

    def clear_gradient(self) -> None:
        """Forget the pending gradient and its poison."""
        self.grad.zero_()
        self.has_gradient = False
        self.poison = None


class AdapterPool:
    """The open adapters by job: at most `slots`, and nothing iterates over those that are idle."""

    def __init__(self, targets: Sequence[Target], *, slots: int, device: torch.device) -> None:
        self.slots = slots
        self._targets = targets
        self._device = device
        self._adapters: dict[str, Adapter] = {}
        self._layouts: dict[tuple[int, bool, bool, bool], Layout] = {}

    def __contains__(self, job: str) -> bool:
        return job in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, job: str) -> Adapter | None:
        return self._adapters.get(job)

    def open(self, job: str, init: Init) -> Adapter:
        """A fresh adapter. One that the job had is discarded: init is seq 1, so what came before is void.

        Raises:
            InvalidHyperparameter: a flag that is on matches no linear map of this model.
            OutOfMemory: all slots are taken, or the device has no memory for the rows.
        """
        layout = self._layout(init)
        self.close(job)
        if len(self._adapters) >= self.slots:
            message = f"all {self.slots} adapter slots of this worker are taken: end a job or add a worker"
            raise OutOfMemory(message, limit=self.slots)
        adapter = self._adapters[job] = Adapter(job, layout, init, self._device)
        return adapter

    def close(self, job: str) -> None:
        """Free the job's slot, if it has one. The rows are wiped first: freed memory is handed to others."""
        adapter = self._adapters.pop(job, None)
        if adapter is not None:
            adapter.rows.zero_()

    def _layout(self, init: Init) -> Layout:
        key = (init.rank, init.train_attn, init.train_mlp, init.train_unembed)
        if key not in self._layouts:
            kinds = {target.kind for target in self._targets}
            for kind, on in (("attn", init.train_attn), ("mlp", init.train_mlp), ("unembed", init.train_unembed)):
                if on and kind not in kinds:
                    message = f"train_{kind} is on, but this base model has no linear map it applies to: turn it off"
                    raise InvalidHyperparameter(message, field=f"train_{kind}")
            self._layouts[key] = Layout(key, self._targets)
        return self._layouts[key]
