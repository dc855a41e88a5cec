"""The updates in a job's recent requests, and who let a cycle pass: the client, or the pool.

Two requests that follow each other could run in one cycle, or in two that follow each other. Each cycle more is one that
the job missed. It is the client's if the later request was not there in time, else the pool's, which gave it to others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mainspring.recorder import RequestStory
from mainspring_broker.wire import STAGE

REPEATABLE = (2, 4)  # stages of which one cycle takes several

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Missed:
    """Cycles that passed between a request and the one before it, though they need not have."""

    client: int = 0
    pool: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """One or more forward_backward, then an optim_step; all of them ran. Cycles are counted, times are milliseconds."""

    requests: int
    first: int  # cycle of its first request
    last: int
    period: int | None  # since the first cycle of the update before; None: there is none
    parts: int  # how many forward_backward
    parts_awaited: bool  # one of them was submitted when the result of another was there
    step_awaited: bool  # the optim_step was submitted when the result of the last forward_backward was there
    awaited: bool  # its first request was submitted when the update before was finished
    missed: Missed  # inside it
    idle: Missed  # between the update before and this one
    queued_ms: float  # something was submitted and nothing ran, since the update before was finished
    compute_ms: float  # something ran
    client_ms: float  # nothing was submitted that was not finished

    @property
    def span(self) -> int:
        return self.last - self.first + 1


def find_updates(stories: Sequence[RequestStory], token_budget: int | None = None) -> list[Update]:
    """The finished updates among a job's requests, in order. `token_budget`: of one cycle, None if not known."""
    ran = sorted((story for story in stories if story.cycle is not None), key=lambda story: story.seq)
    missed = [Missed(), *_missed(ran, token_budget)]
    busy = _union((s.submitted_at, s.answered_at) for s in stories if s.answered_at is not None)
    computing = _union((_started(s), _started(s) + s.compute_ms / 1000) for s in ran)
    updates: list[Update] = []
    before: list[RequestStory] = []
    begin = idle_from = 0
    in_parts = False
    for index, story in enumerate(ran):
        if story.op == "forward_backward" and not in_parts:
            begin, in_parts = index, True
        elif in_parts and story.op == "optim_step":
            requests = ran[begin : index + 1]
            window = (_answered(before[-1]) if before else requests[0].submitted_at, _answered(story))
            updates.append(_update(requests, before, missed, (idle_from, begin, index), window, busy, computing))
            before, idle_from, in_parts = requests, index + 1, False
    return updates


def _update(
    requests: Sequence[RequestStory],
    before: Sequence[RequestStory],
    missed: Sequence[Missed],
    places: tuple[int, int, int],
    window: Interval,
    busy: Sequence[Interval],
    computing: Sequence[Interval],
) -> Update:
    """`missed` is by index of a job's request; `places` are those of the first after the update before, first, last."""
    idle_from, begin, end = places
    *parts, step = requests
    first, last = _cycle(parts[0]), _cycle(step)
    occupied, computed = _overlap(busy, window), _overlap(computing, window)
    return Update(
        requests=len(requests),
        first=first,
        last=last,
        period=first - _cycle(before[0]) if before else None,
        parts=len(parts),
        parts_awaited=any(_awaited(a, b) for a, b in pairwise(parts)),
        step_awaited=_awaited(parts[-1], step),
        awaited=bool(before) and _awaited(before[-1], parts[0]),
        missed=_sum(missed[begin + 1 : end + 1]),
        idle=_sum(missed[idle_from : begin + 1]) if before else Missed(),
        queued_ms=max(occupied - computed, 0.0) * 1000,
        compute_ms=min(computed, occupied) * 1000,
        client_ms=max(window[1] - window[0] - occupied, 0.0) * 1000,
    )


# -- cycles -----------------------------------------------------------------------------------------------------------


def _missed(ran: Sequence[RequestStory], token_budget: int | None) -> Iterable[Missed]:
    """For each request but the first."""
    tokens = ran[0].tokens if ran else 0  # of the job in its cycle so far
    for a, b in pairwise(ran):
        steps = _cycle(b) - _cycle(a)
        fits = token_budget is None or tokens + b.tokens <= token_budget
        needed = 0 if fits and _may_share(a.op, b.op) else 1
        yield _blame(a, b, steps, needed)
        tokens = b.tokens if steps else tokens + b.tokens


def _blame(a: RequestStory, b: RequestStory, steps: int, needed: int) -> Missed:
    missed = steps - needed
    if missed <= 0:
        return Missed()
    if _awaited(a, b):
        # The next cycle had begun when the result of `a` was there. Any other that passed while `b` was queued is the pool's.
        cycle_s = max(_started(b) - _started(a), 1e-9) / steps
        waited = int(b.queued_ms / 1000 / cycle_s)
        pool = max(0, min(waited, steps - 2))
        return Missed(missed - pool, pool)
    late = needed == 0 and _accepted(b) > _started(a)
    return Missed(int(late), missed - int(late))


def _may_share(a: str, b: str) -> bool:
    """Whether a cycle takes operation `b` behind `a`: its phases have an order."""
    first, second = STAGE.get(a, 2), STAGE.get(b, 2)
    return second > first or (second == first and first in REPEATABLE)


def _awaited(a: RequestStory, b: RequestStory) -> bool:
    return b.submitted_at >= _answered(a)


def _sum(missed: Sequence[Missed]) -> Missed:
    return Missed(sum(m.client for m in missed), sum(m.pool for m in missed))


# -- times ------------------------------------------------------------------------------------------------------------


def _cycle(story: RequestStory) -> int:
    assert story.cycle is not None
    return story.cycle


def _answered(story: RequestStory) -> float:
    assert story.answered_at is not None  # what ran was answered
    return story.answered_at


def _accepted(story: RequestStory) -> float:
    """An answer may be quicker than the reply to the submit."""
    return story.submitted_at if story.accepted_at is None else min(story.accepted_at, _answered(story))


def _started(story: RequestStory) -> float:
    """When its cycle began, by this client's clock."""
    return min(_accepted(story) + story.queued_ms / 1000, _answered(story) - story.compute_ms / 1000)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, and no two of them touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _overlap(merged: Sequence[Interval], window: Interval) -> float:
    """How much of the window the intervals cover."""
    covered = 0.0
    for start, end in merged[bisect_left(merged, window[0], key=lambda interval: interval[1]) :]:
        if start >= window[1]:
            break
        covered += min(end, window[1]) - max(start, window[0])
    return covered
