"""How well a training loop uses the clock: span and period of its updates, where the time went, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from mainspring.advice import AdviceCode, advise
from mainspring.recorder import RequestStory
from mainspring.updates import Update, find_updates

MAX_UPDATES = 200


@dataclass(frozen=True, slots=True)
class TimeShare:
    """Where the time between two finished updates went."""

    ms: float  # median of an update
    share: float  # of the time of all updates, 0 to 1


@dataclass(frozen=True, slots=True)
class CycleReport:
    """The last updates of one training client. Printed, it is a small table with the advice below.

    Attributes:
        updates: how many, an optim_step that failed among them; those whose every request ran.
        cycles: first and last cycle; None when there is no update.
        span: cycles from the first to the last request of an update, median; 1 is the best.
        period: cycles from the start of one update to the start of the next, median; 1 is the best. None for one update.
        idle_cycles: cycles between updates in which the job had nothing to run, because the client had not submitted it.
        waited_cycles: cycles in which it had something to run, and the pool ran others.
        requests_per_update: median; a batch that was split counts each part.
        queued: something was submitted and not yet running, or its result was on the way.
        compute: something ran.
        client: nothing of this job was queued or running.
        failed_requests: of all that are remembered, without those that were cancelled.
        code: what kind of advice it is.
        advice: one sentence: what to change.
    """

    updates: int
    cycles: tuple[int, int] | None
    span: float | None
    period: float | None
    idle_cycles: int
    waited_cycles: int
    requests_per_update: float | None
    queued: TimeShare
    compute: TimeShare
    client: TimeShare
    failed_requests: int
    code: AdviceCode
    advice: str

    def __str__(self) -> str:
        where = f" in cycles {self.cycles[0]} to {self.cycles[1]}" if self.cycles else ""
        each = [(name, getattr(self, name)) for name in ("queued", "compute", "client")]
        times = " · ".join(f"{name} {time.ms:.0f} ms ({time.share:.0%})" for name, time in each)
        rows = [
            ("updates", f"{self.updates}{where}, {self.failed_requests} requests failed"),
            ("span", f"{_number(self.span)} (cycles from the first to the last request of an update)"),
            ("period", f"{_number(self.period)} (cycles from update to update)"),
            ("missed", f"{self.idle_cycles} cycles idle between updates, {self.waited_cycles} waited for a share"),
            ("requests", f"{_number(self.requests_per_update)} an update"),
            ("time", f"an update: {times}"),
            ("advice", self.advice),
        ]
        return "\n".join(f"{name:<9} {text}" for name, text in rows)


def make_report(
    stories: Sequence[RequestStory], *, last: int = MAX_UPDATES, token_budget: int | None = None
) -> CycleReport:
    """The report on the last updates among a job's requests. `token_budget`: of a cycle, None if it is not known."""
    updates = find_updates(stories, token_budget)[-last:]
    total_ms = sum(u.queued_ms + u.compute_ms + u.client_ms for u in updates)

    def time_share(ms: Callable[[Update], float]) -> TimeShare:
        return TimeShare(_median(map(ms, updates)) or 0.0, sum(map(ms, updates)) / total_ms if total_ms else 0.0)

    code, advice = advise(updates)
    return CycleReport(
        updates=len(updates),
        cycles=(updates[0].first, updates[-1].last) if updates else None,
        span=_median(u.span for u in updates),
        period=_median(u.period for u in updates[1:] if u.period is not None),
        idle_cycles=sum(u.idle.client for u in updates[1:]),
        waited_cycles=sum(u.missed.pool + u.idle.pool for u in updates),
        requests_per_update=_median(u.requests for u in updates),
        queued=time_share(lambda u: u.queued_ms),
        compute=time_share(lambda u: u.compute_ms),
        client=time_share(lambda u: u.client_ms),
        failed_requests=sum(story.error not in (None, "request_cancelled") for story in stories),
        code=code,
        advice=advice,
    )


def _median(numbers: Iterable[float]) -> float | None:
    values = list(numbers)
    return float(median(values)) if values else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
