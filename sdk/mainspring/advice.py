"""The one thing to change in a training loop, in a plain sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from statistics import median

from mainspring.updates import Update

ENOUGH = 3  # updates, before anything is said
NOTICEABLE = 0.1  # share of the time without anything submitted that is worth a word


class AdviceCode(StrEnum):
    """What a cycle report advises."""

    TOO_EARLY = "too_early"  # too few updates to judge
    SUBMIT_BOTH_FIRST = "submit_both_first"  # the optim_step comes too late for its forward_backward's cycle
    SEND_TOGETHER = "send_together"  # the forward_backward of one update are awaited one by one
    LOOK_AHEAD = "look_ahead"  # the next update comes too late for the cycle behind this one
    POOL_FULL = "pool_full"  # requests are there in time and wait for their share
    NOTHING_TO_CHANGE = "nothing_to_change"


def advise(updates: Sequence[Update]) -> tuple[AdviceCode, str]:
    """What to change, most important first."""
    if len(updates) < ENOUGH:
        return AdviceCode.TOO_EARLY, f"too early to say: ask again after {ENOUGH} updates or more."
    follow = updates[1:]
    span, period = _median(updates, lambda u: u.span), _median(follow, lambda u: u.period or 0)
    alone = _median(updates, lambda u: u.span - u.missed.client - u.missed.pool)
    parts, waited = _median(updates, lambda u: u.parts), _median(updates, lambda u: u.missed.pool + u.idle.pool)
    idle, client_ms = _median(follow, lambda u: u.idle.client), _median(follow, lambda u: u.client_ms)
    total_ms = sum(u.queued_ms + u.compute_ms + u.client_ms for u in follow)
    client_share = sum(u.client_ms for u in follow) / max(total_ms, 1e-9)

    if _most(updates, lambda u: u.parts_awaited):
        return AdviceCode.SEND_TOGETHER, (
            f"the {parts:g} forward_backward of an update were awaited one after another: send them together before the "
            f"optim_step, then wait, and each update takes {_cycles(alone)}, not {span:g}."
        )
    if _most(updates, lambda u: u.step_awaited):
        return AdviceCode.SUBMIT_BOTH_FIRST, (
            "optim_step was submitted after the forward_backward result was awaited: submit both first and each update "
            f"takes {_cycles(alone)}, not {span:g}."
        )
    if parts == 1 and _most(updates, lambda u: u.missed.client > 0):
        return AdviceCode.SUBMIT_BOTH_FIRST, (
            "optim_step was submitted when the cycle of its forward_backward had begun: submit it directly behind, with no "
            f"work in between, and each update takes {_cycles(alone)}, not {span:g}."
        )
    if waited >= 1 and waited >= idle:
        return AdviceCode.POOL_FULL, (
            f"the pool is full: your requests waited {_cycles(waited)} an update for their share; more workers, a larger "
            "weight or fewer jobs at a time change that, another order of submits does not."
        )
    if _most(follow, lambda u: u.awaited) and (idle >= 1 or client_share > NOTICEABLE):
        lost = f"{_cycles(idle)} passed" if idle else f"{client_ms:.0f} ms passed"
        slow = client_ms > _median(follow, lambda u: u.queued_ms + u.compute_ms)
        gain = f", and an update begins every {_every(period - idle)}, not every {_cycles(period)}" if idle else ""
        return AdviceCode.LOOK_AHEAD, (
            f"each update was submitted after the one before was finished, and {lost} with nothing of this job to run: "
            f"submit the next batch before awaiting this one{', and prepare it while this one runs' if slow else ''}{gain}."
        )
    if span > 1:
        return AdviceCode.NOTHING_TO_CHANGE, (
            f"nothing to change: an update's {parts:g} forward_backward spread over {_cycles(span)}, and none was missed."
        )
    return AdviceCode.NOTHING_TO_CHANGE, "nothing to change: every update was there in time for its cycle."


def _median(updates: Sequence[Update], number: Callable[[Update], float]) -> float:
    return median(map(number, updates))


def _most(updates: Sequence[Update], holds: Callable[[Update], bool]) -> bool:
    return 2 * sum(map(holds, updates)) > len(updates)


def _cycles(number: float) -> str:
    return f"{number:g} cycle{'' if number == 1 else 's'}"


def _every(number: float) -> str:
    return "cycle" if number == 1 else _cycles(number)
