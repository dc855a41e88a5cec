"""The rules of a cycle, as pure functions: what a boundary takes, in which order, and when it closes.

No Redis, no time of its own. The Lua function `tick` does the same inside Redis; one table of cases and random queues run
against both, so that either may be read as the explanation of the other.

Fair share is start-time fair queueing, kept by each worker for itself, since its jobs can run nowhere else. Tenants first,
then the jobs within a tenant, have a virtual time: the tokens they were given, divided by their weight. Whoever is
furthest behind is next. The present is the lowest virtual time whose turn came in the last cycle; who was away starts
there, so that nobody saves up a claim while asleep. A job that was next but did not fit goes first in the next cycle,
when the worker is empty, or small neighbours could keep a large batch waiting for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mainspring_broker.wire import STAGE

PLACE_LIMIT = 256  # jobs placed in one tick
SKIP_LIMIT = 32  # jobs passed over, per worker and tick, because their head does not fit into what is left
MAX_PREFIX = 256  # requests of one job looked at per tick
MIN_COST = 1  # tokens that a turn counts at least, so that requests without tokens take turns too
MIN_WEIGHT = 1e-6

COMPUTE = 2
ONCE = {1, 3, 5}  # stages of which a cycle takes one request


# -- what one job gives to a cycle ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """What the clock knows of a request."""

    seq: int
    op: str
    tokens: int


def prefix(headers: Sequence[Header], budget_left: int, empty: bool) -> Sequence[Header]:
    """The longest `(init|load_state)? (forward|forward_backward)* optim_step? (save)* end?` that the budget allows.

    Nothing that reads or changes weights follows an `optim_step` in one cycle. When the worker is otherwise `empty`, the
    first request with tokens runs whatever its size, or it never could.
    """
    tokens, stage = 0, 1
    for position, header in enumerate(headers[:MAX_PREFIX]):
        at = STAGE.get(header.op, COMPUTE)  # an unknown operation keeps its place, and fails
        if at < stage or (at in ONCE and at == stage and position > 0):
            return headers[:position]
        fits = header.tokens == 0 or tokens + header.tokens <= budget_left or (empty and tokens == 0)
        if not fits:
            return headers[:position]
        tokens += header.tokens
        stage = at
    return headers[:MAX_PREFIX]


# -- which jobs get a turn --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """A job with an eligible head, held by the worker that is selected for."""

    tenant: str
    name: str
    queue: tuple[Header, ...]
    vtime: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Fair:
    """A worker's memory of who got how much, from one cycle to the next."""

    present: float = 0.0  # of the tenants
    tenants: Mapping[str, float] = field(default_factory=dict)  # virtual time of each tenant
    jobs: Mapping[str, float] = field(default_factory=dict)  # present of the jobs of each tenant
    passed: tuple[str, str] | None = None  # the job that did not fit last time: it goes first


@dataclass(frozen=True, slots=True)
class Turn:
    """What one job does in the cycle."""

    job: Job  # with its virtual time after the turn
    requests: Sequence[Header]

    @property
    def tokens(self) -> int:
        return sum(header.tokens for header in self.requests)


@dataclass(slots=True)
class _Share:
    """A tenant while one batch is selected."""

    tenant: str
    weight: float
    vtime: float
    waiting: list[Job]  # furthest behind first
    skipped: int = 0  # of them, from the front, passed over in this batch

    @property
    def next(self) -> Job | None:
        return self.waiting[self.skipped] if self.skipped < len(self.waiting) else None


def select(
    fair: Fair, weights: Mapping[str, float], jobs: Iterable[Job], budget_tokens: int
) -> tuple[list[Turn], Fair]:
    """One worker's batch: again and again the tenant, and of it the job, that is furthest behind.

    Args:
        fair: the worker's memory; the second value returned is the new one.
        weights: of the tenants; one that is missing here gets nothing.
        jobs: those of this worker with an eligible head.
        budget_tokens: tokens for this batch; only a first request that is larger alone goes beyond.
    """
    ready: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: (job.vtime, job.name)):
        ready.setdefault(job.tenant, []).append(job)
    shares = [
        _Share(name, max(weights[name], MIN_WEIGHT), max(fair.tenants.get(name, 0.0), fair.present), ready[name])
        for name in sorted(ready)
        if name in weights
    ]
    turns: list[Turn] = []
    tenants, presents = dict(fair.tenants), dict(fair.jobs)
    lowest = math.inf
    lowest_job: dict[str, float] = {}
    passed: tuple[str, str] | None = None
    used, skips = 0, 0
    first = _find(shares, fair.passed)
    while skips < SKIP_LIMIT and (used < budget_tokens or not turns):
        if first is not None:
            share, job = first
            first = None
        else:
            waiting = [share for share in shares if share.next is not None]
            if not waiting:
                break
            share = min(waiting, key=lambda share: share.vtime)
            job = share.waiting[share.skipped]
        start = max(job.vtime, presents.get(job.tenant, 0.0))
        lowest = min(lowest, share.vtime)
        lowest_job[job.tenant] = min(start, lowest_job.get(job.tenant, start))
        requests = prefix(job.queue, budget_tokens - used, used == 0)
        if not requests:
            share.skipped += 1
            skips += 1
            passed = passed or (job.tenant, job.name)
            continue
        share.waiting.remove(job)
        tokens = sum(header.tokens for header in requests)
        cost = max(tokens, MIN_COST)
        turns.append(Turn(replace(job, vtime=start + cost / max(job.weight, MIN_WEIGHT)), requests))
        share.vtime += cost / share.weight
        tenants[share.tenant] = share.vtime
        used += tokens
    if not turns:
        return [], fair
    presents.update((tenant, max(presents.get(tenant, 0.0), start)) for tenant, start in lowest_job.items())
    return turns, Fair(max(fair.present, lowest), tenants, presents, passed)


def _find(shares: Iterable[_Share], wanted: tuple[str, str] | None) -> tuple[_Share, Job] | None:
    for share in shares:
        for job in share.waiting:
            if (job.tenant, job.name) == wanted:
                return share, job
    return None


# -- where new jobs go ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker, as placement sees it."""

    name: str
    slots: int  # jobs it can hold
    jobs: int = 0  # jobs it holds
    load: float = 0.0  # tokens of its last batches, the older the less


def place(jobs: Mapping[str, Sequence[str]], workers: Iterable[Worker]) -> tuple[dict[tuple[str, str], str], int]:
    """A worker for each job that has none: the one with the fewest jobs, then with the least load.

    Tenants take turns, so that one with many new jobs does not take every free slot.

    Args:
        jobs: for each tenant its jobs without a worker, the first to be placed first.

    Returns:
        The worker of each (tenant, job) that was placed, and how many found no free slot.
    """
    held = {worker.name: worker for worker in sorted(workers, key=lambda worker: worker.name)}
    placed: dict[tuple[str, str], str] = {}
    rounds = max((len(names) for names in jobs.values()), default=0)
    for turn in range(rounds):
        for tenant in sorted(jobs):
            if turn >= len(jobs[tenant]):
                continue
            free = [worker for worker in held.values() if worker.jobs < worker.slots]
            if not free or len(placed) == PLACE_LIMIT:
                return placed, sum(map(len, jobs.values())) - len(placed)
            best = min(free, key=lambda worker: (worker.jobs, worker.load))
            held[best.name] = replace(best, jobs=best.jobs + 1)
            placed[tenant, jobs[tenant][turn]] = best.name
    return placed, 0


# -- when the boundary of an idle pool closes -------------------------------------------------------------------------


class Gather:
    """How long an idle pool waits after work arrives, so that requests submitted together run together.

    The window is open for `window_ms` after the latest arrival, and for `limit_ms` after the first at most. Times are
    milliseconds of any steady clock, given by the caller.
    """

    def __init__(self, window_ms: float = 5.0, limit_ms: float = 25.0) -> None:
        self.window_ms = window_ms
        self.limit_ms = limit_ms
        self._first_ms = self._latest_ms = float("-inf")

    def started(self, now_ms: float) -> None:
        """The first arrival: the window opens."""
        self._first_ms = self._latest_ms = now_ms

    def arrived(self, now_ms: float) -> None:
        """One more arrival."""
        self._latest_ms = now_ms

    def wait_ms(self, now_ms: float) -> float:
        """How much longer to wait; 0 when the boundary should close."""
        closes_ms = min(self._latest_ms + self.window_ms, self._first_ms + self.limit_ms)
        return max(closes_ms - now_ms, 0.0)
