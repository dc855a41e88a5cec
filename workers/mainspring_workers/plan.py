"""The plan of one fused pass: which tokens lie where. Pure data, numpy only.

All sequences lie one behind the other in one flat array, in a canonical order: layout group, job, seq, datum. So the
rows of a job are contiguous (nothing is sorted inside a layer), a request's outputs are one slice, and a replay
gives the same bits for the same composition. Micro-batches are consecutive slices, cut between datums.

    T  tokens of the micro-batch      N  its sequences (datums)      M  tokens whose target is not ignored
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainspring_workers.validate import IGNORED, Batch

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One forward or forward_backward, checked."""

    group: tuple[Any, ...]  # jobs of one group have adapters of the same layout
    job: str
    seq: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring jobs of one group with equally many rows each: rows [start, end), jobs [first, last)."""

    group: int  # index into BatchPlan.groups
    first: int  # index into the jobs of the group
    last: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LossRun:
    """Rows [start, end) (of the M that count) that share a loss and its settings."""

    loss_fn: str
    config: tuple[tuple[str, float], ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Sequences grouped by exactly equal length, so that attention needs no padding and no mask."""

    groups: tuple[tuple[int, int], ...]  # (sequences, length), shortest first
    order: IntArray | None  # [T]: row of the flat layout for each row of the grouped one; None: they are the same
    inverse: IntArray | None  # [T]: the way back


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A slice of the flat layout that goes through the model together."""

    start: int  # in the flat layout
    end: int
    attention: AttentionPlan
    runs: tuple[Run, ...]  # of all T rows
    head_rows: IntArray | None  # [M]: the rows with a target; None: all
    head_runs: tuple[Run, ...]  # of the M rows, one job each
    loss_runs: tuple[LossRun, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Everything that a pass needs but the adapters themselves."""

    tokens: IntArray  # [all tokens]
    positions: IntArray  # [all tokens], from 0 in each sequence
    targets: IntArray  # [all tokens]
    inputs: dict[str, NDArray[np.float32]]  # [all tokens] each; 0 where a request does not have it
    groups: tuple[tuple[str, ...], ...]  # jobs of each group
    spans: tuple[tuple[int, int], ...]  # by request as given: its slice of the flat layout
    micro_batches: tuple[MicroBatch, ...]


def build_plan(requests: Sequence[PlanRequest], micro_batch_tokens: int) -> BatchPlan:
    """Lay out `requests`. A datum longer than `micro_batch_tokens` is a micro-batch of its own."""
    order = sorted(range(len(requests)), key=lambda i: (requests[i].group, requests[i].job, requests[i].seq))
    ordered = [requests[i] for i in order]
    lengths = np.concatenate([request.batch.lengths for request in ordered]).astype(np.int64)
    datum_ends = np.cumsum(lengths)
    request_ends = np.cumsum([len(request.batch.tokens) for request in ordered])
    spans = [(0, 0)] * len(requests)
    for position, index in enumerate(order):
        end = int(request_ends[position])
        spans[index] = (end - len(ordered[position].batch.tokens), end)
    targets = np.concatenate([request.batch.targets for request in ordered])
    jobs = _Jobs(ordered, request_ends)
    return BatchPlan(
        tokens=np.concatenate([request.batch.tokens for request in ordered]),
        positions=np.arange(len(targets)) - np.repeat(datum_ends - lengths, lengths),
        targets=targets,
        inputs=_flat_inputs(ordered, len(targets)),
        groups=jobs.groups,
        spans=tuple(spans),
        micro_batches=tuple(
            _micro_batch(start, end, seqs, targets, jobs, ordered, request_ends)
            for start, end, seqs in _cut(lengths, datum_ends, micro_batch_tokens)
        ),
    )


class _Jobs:
    """Where each job's rows are in the flat layout, and its place in its group."""

    def __init__(self, ordered: Sequence[PlanRequest], request_ends: IntArray) -> None:
        names = [(request.group, request.job) for request in ordered]
        last = [i for i in range(len(names)) if i + 1 == len(names) or names[i] != names[i + 1]]
        self.ends = request_ends[last]
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.group: list[int] = []
        self.index: list[int] = []
        groups: list[list[str]] = []
        previous = None
        for i in last:
            if names[i][0] != previous:
                groups.append([])
                previous = names[i][0]
            self.group.append(len(groups) - 1)
            self.index.append(len(groups[-1]))
            groups[-1].append(names[i][1])
        self.groups = tuple(tuple(group) for group in groups)

    def segments(self, start: int, end: int) -> list[Run]:
        """The jobs that have rows in [start, end), one Run each, relative to `start`."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left"))
        return [
            Run(
                self.group[j],
                self.index[j],
                self.index[j] + 1,
                max(int(self.starts[j]), start) - start,
                min(int(self.ends[j]), end) - start,
            )
            for j in range(first, last)
        ]


def _cut(lengths: IntArray, datum_ends: IntArray, budget: int) -> list[tuple[int, int, IntArray]]:
    """(first row, last row + 1, lengths of the sequences) of each micro-batch: as many datums as fit `budget`."""
    cuts = []
    first, start = 0, 0
    while first < len(lengths):
        last = max(int(np.searchsorted(datum_ends, start + budget, side="right")), first + 1)
        end = int(datum_ends[last - 1])
        cuts.append((start, end, lengths[first:last]))
        first, start = last, end
    return cuts


def _micro_batch(
    start: int,
    end: int,
    lengths: IntArray,
    targets: IntArray,
    jobs: _Jobs,
    ordered: Sequence[PlanRequest],
    request_ends: IntArray,
) -> MicroBatch:
    segments = jobs.segments(start, end)
    counts = targets[start:end] != IGNORED
    kept = np.concatenate([[0], np.cumsum(counts)])  # kept[i]: rows before i that have a target
    first = int(np.searchsorted(request_ends, start, side="right"))
    loss_runs: list[LossRun] = []
    while first < len(ordered) and (begin := int(request_ends[first]) - len(ordered[first].batch.tokens)) < end:
        batch = ordered[first].batch
        low, high = int(kept[max(begin, start) - start]), int(kept[min(int(request_ends[first]), end) - start])
        if loss_runs and (loss_runs[-1].loss_fn, loss_runs[-1].config) == (batch.loss_fn, batch.config):
            low = loss_runs.pop().start
        loss_runs.append(LossRun(batch.loss_fn, batch.config, low, high))
        first += 1
    return MicroBatch(
        start=start,
        end=end,
        attention=plan_attention(lengths),
        runs=_merge_equal(segments),
        head_rows=None if counts.all() else np.flatnonzero(counts),
        head_runs=tuple(
            Run(s.group, s.first, s.last, int(kept[s.start]), int(kept[s.end]))
            for s in segments
            if kept[s.start] < kept[s.end]
        ),
        loss_runs=tuple(run for run in loss_runs if run.start < run.end),
    )


def _merge_equal(segments: Sequence[Run]) -> tuple[Run, ...]:
    merged: list[Run] = []
    for segment in segments:
        if merged and merged[-1].group == segment.group:
            before = merged[-1]
            if (before.end - before.start) == (segment.end - segment.start) * (before.last - before.first):
                merged[-1] = Run(before.group, before.first, segment.last, before.start, segment.end)
                continue
        merged.append(segment)
    return tuple(merged)


def plan_attention(lengths: IntArray) -> AttentionPlan:
    """Group sequences of `lengths` [N], which lie one behind the other, by length."""
    by_length = np.argsort(lengths, kind="stable")
    sizes, counts = np.unique(lengths, return_counts=True)
    groups = tuple((int(count), int(size)) for count, size in zip(counts, sizes, strict=True))
    if np.array_equal(by_length, np.arange(len(lengths))):
        return AttentionPlan(groups, None, None)
    starts = (np.cumsum(lengths) - lengths)[by_length]
    sorted_lengths = lengths[by_length]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(sorted_lengths) - sorted_lengths, sorted_lengths)
    order = np.repeat(starts, sorted_lengths) + within
    return AttentionPlan(groups, order, np.argsort(order))


def _flat_inputs(ordered: Sequence[PlanRequest], total: int) -> dict[str, NDArray[np.float32]]:
    names = sorted({name for request in ordered for name in request.batch.inputs})
    flat = {name: np.zeros(total, np.float32) for name in names}
    start = 0
    for request in ordered:
        end = start + len(request.batch.tokens)
        for name, values in request.batch.inputs.items():
            flat[name][start:end] = values
        start = end
    return flat
