"""Cycle reports from made-up stories: a pool whose cycles last 10 ms each, and clients that submit at known times."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from mainspring import AdviceCode, CycleReport
from mainspring.recorder import Recorder, RequestStory
from mainspring.report import make_report
from mainspring.updates import STAGE, find_updates
from mainspring_clock import policy

CYCLE_S = 0.010
REACTION_S = 0.001  # of a client, from a result to its next request
UPDATES = 10


@dataclass
class Pool:
    """A busy pool: cycle n runs from n * CYCLE_S on. `turn`: the job gets its share in every turn-th cycle only."""

    turn: int = 1
    stories: list[RequestStory] = field(default_factory=list)

    def submit(
        self, op: str, at: float = 0.0, *, apart: bool = False, tokens: int = 10, error: str | None = None
    ) -> float:
        """Returns when its result is there. `apart`: not in the cycle of the request before, though it might be."""
        cycle = math.ceil(at / CYCLE_S - 1e-9)
        last = self.stories[-1] if self.stories else None
        if last is not None:
            apart = apart or STAGE[op] < STAGE[last.op] or (op == last.op == "optim_step")
            cycle = max(cycle, (last.cycle or 0) + apart)
        if last is None or cycle != last.cycle:
            cycle = math.ceil(cycle / self.turn) * self.turn
        answered = (cycle + 1) * CYCLE_S
        queued_ms = (cycle * CYCLE_S - at) * 1000
        self.stories.append(
            RequestStory(
                op, tokens, at, len(self.stories) + 1, at, answered, cycle, queued_ms, CYCLE_S * 1000 - 0.5, error
            )
        )
        return answered


def naive(pool: Pool, pause: float = 0.0) -> None:
    now = 0.0
    for _ in range(UPDATES):
        now = pool.submit("forward_backward", now) + REACTION_S
        now = pool.submit("optim_step", now) + REACTION_S + pause


def pair(pool: Pool, pause: float = 0.0) -> None:
    now = 0.0
    for _ in range(UPDATES):
        pool.submit("forward_backward", now)
        now = pool.submit("optim_step", now) + REACTION_S + pause


def pipelined(pool: Pool, parts: int = 1) -> None:
    ends = [0.0, 0.0]
    for _ in range(UPDATES):
        now = ends[-2] + REACTION_S
        for _ in range(parts):
            pool.submit("forward_backward", now)
        ends.append(pool.submit("optim_step", now))


def accumulating(pool: Pool) -> None:
    pipelined(pool, parts=4)


def accumulating_one_by_one(pool: Pool) -> None:
    now = 0.0
    for _ in range(UPDATES):
        for _ in range(4):
            now = pool.submit("forward_backward", now) + REACTION_S
        now = pool.submit("optim_step", now) + REACTION_S


def starved(pool: Pool) -> None:
    pool.turn = 4
    pipelined(pool)


def report_of(client: Callable[[Pool], None], token_budget: int | None = None) -> CycleReport:
    pool = Pool()
    client(pool)
    return make_report(pool.stories, token_budget=token_budget)


@pytest.mark.parametrize(
    ("client", "span", "period", "idle", "waited", "requests", "code", "words"),
    [
        (naive, 3, 4, 9, 0, 2, AdviceCode.SUBMIT_BOTH_FIRST, "submit both first and each update takes 1 cycle, not 3"),
        (pair, 1, 2, 9, 0, 2, AdviceCode.LOOK_AHEAD, "submit the next batch before awaiting this one"),
        (pipelined, 1, 1, 0, 0, 2, AdviceCode.NOTHING_TO_CHANGE, "every update was there in time"),
        (accumulating, 1, 1, 0, 0, 5, AdviceCode.NOTHING_TO_CHANGE, "nothing to change"),
        (accumulating_one_by_one, 9, 10, 9, 0, 5, AdviceCode.SEND_TOGETHER, "takes 1 cycle, not 9"),
        (starved, 1, 4, 0, 27, 2, AdviceCode.POOL_FULL, "waited 3 cycles an update for their share"),
    ],
)
def test_each_kind_of_client_is_told_what_it_can_change(client, span, period, idle, waited, requests, code, words):
    report = report_of(client)
    assert (report.updates, report.span, report.period) == (UPDATES, span, period)
    assert (report.idle_cycles, report.waited_cycles) == (idle, waited)
    assert (report.requests_per_update, report.failed_requests) == (requests, 0)
    assert report.code is code
    assert words in report.advice


def test_the_shares_of_time_are_those_of_queue_compute_and_client():
    report = report_of(lambda pool: pair(pool, pause=0.020))
    assert report.queued.share + report.compute.share + report.client.share == pytest.approx(1)
    assert report.client.ms == pytest.approx(21)
    assert report.compute.ms == pytest.approx(9.5)
    assert report.queued.ms == pytest.approx(9.5)
    assert report_of(pipelined).client.share == 0


def test_a_slow_client_is_told_to_work_meanwhile():
    report = report_of(lambda pool: pair(pool, pause=0.040))
    assert report.code is AdviceCode.LOOK_AHEAD
    assert "prepare it while this one runs" in report.advice
    assert "prepare it" not in report_of(pair).advice


def test_a_step_that_comes_late_is_told_from_one_that_awaits():
    def dawdling(pool: Pool) -> None:
        now = 0.009
        for _ in range(UPDATES):
            pool.submit("forward_backward", now)
            now = pool.submit("optim_step", now + 0.005) + 0.009

    report = report_of(dawdling)
    assert (report.span, report.code) == (2, AdviceCode.SUBMIT_BOTH_FIRST)
    assert "had begun" in report.advice


def test_a_naive_or_pair_client_on_a_full_pool_hears_of_what_it_can_change_first():
    full = Pool(turn=6)
    naive(full)
    assert make_report(full.stories).code is AdviceCode.SUBMIT_BOTH_FIRST
    full = Pool(turn=6)
    pair(full)
    report = make_report(full.stories)
    assert (report.code, report.idle_cycles, report.waited_cycles) == (AdviceCode.POOL_FULL, 9, 36)


def test_an_update_larger_than_a_cycle_is_nobodys_fault():
    pool = Pool()
    for update in range(UPDATES):
        for _ in range(3):
            pool.submit("forward_backward", apart=True, tokens=100)
        pool.submit("optim_step")
        assert pool.stories[-1].cycle == 3 * update + 2
    known, unknown = make_report(pool.stories, token_budget=150), make_report(pool.stories)
    assert (known.span, known.period, known.waited_cycles) == (3, 3, 0)
    assert known.code is AdviceCode.NOTHING_TO_CHANGE
    assert "spread over 3 cycles" in known.advice
    assert unknown.waited_cycles == 2 * UPDATES


def test_a_sampler_save_between_updates_is_not_idle_time():
    pool = Pool()
    for _ in range(UPDATES):
        for op in ("forward_backward", "optim_step", "save_weights"):
            pool.submit(op)
    report = make_report(pool.stories)
    assert (report.span, report.idle_cycles, report.code) == (1, 0, AdviceCode.NOTHING_TO_CHANGE)


def test_failures_are_counted_and_cancelled_requests_are_not():
    pool = Pool()
    pool.submit("forward_backward", error="token_out_of_range")
    pool.submit("optim_step", error="preceding_request_failed")
    pool.submit("forward_backward", error="request_cancelled")
    pool.stories.append(RequestStory("optim_step", 0, 0.0, error="server_full", answered_at=0.1))
    assert make_report(pool.stories).failed_requests == 3


def test_before_there_is_anything_to_say():
    for stories in ([], [RequestStory("forward_backward", 1, 0.0)]):
        report = make_report(stories)
        assert (report.updates, report.cycles, report.span, report.period) == (0, None, None, None)
        assert report.code is AdviceCode.TOO_EARLY
        assert "too early" in str(report)


def test_only_the_last_updates_count_and_half_an_update_does_not():
    pool = Pool()
    naive(pool)
    assert make_report(pool.stories, last=3).updates == 3
    assert make_report(pool.stories, last=3).cycles == (28, 38)
    assert make_report(pool.stories[1:]).updates == UPDATES - 1  # the recorder has let go of its first request


def test_it_prints_a_table_and_the_advice():
    lines = str(report_of(naive)).splitlines()
    assert lines[0] == "updates   10 in cycles 0 to 38, 0 requests failed"
    assert lines[1] == "span      3 (cycles from the first to the last request of an update)"
    assert lines[2] == "period    4 (cycles from update to update)"
    assert lines[-1].startswith("advice    optim_step was submitted after")
    assert max(map(len, lines[:-1])) < 100


def test_an_answer_may_overtake_the_reply_to_its_submit():
    story = RequestStory("forward_backward", 1, 1.0, 1, None, 1.004, 5, 2.0, 1.0)
    step = RequestStory("optim_step", 0, 1.0, 2, 1.010, 1.005, 5, 2.0, 1.0)
    [update] = find_updates([story, step])
    assert (update.span, update.step_awaited) == (1, False)
    assert update.queued_ms + update.compute_ms + update.client_ms == pytest.approx(5)


def test_the_recorder_is_bounded_and_hands_out_copies():
    recorder = Recorder(limit=3)
    stories = [RequestStory("forward", 1, 0.0, seq) for seq in range(5)]
    recorder.add(stories)
    copies = recorder.stories()
    assert [story.seq for story in copies] == [2, 3, 4]
    stories[4].accepted(9)
    assert copies[2].seq == 4


def test_the_order_of_phases_is_the_clocks():
    assert {op: stage for op, stage in policy.STAGE.items() if op in STAGE} == STAGE
