"""The cycle policy: the table of cases, and what must hold for any queues."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring_clock import policy
from mainspring_clock.policy import Fair, Gather, Header, Worker, place, prefix, select
from tests.policy_cases import CASES, Case, Cycle, JobName, Op


class Pool:
    """One worker's jobs with their queues, run cycle by cycle."""

    def __init__(self, budget: int, weights: dict[str, float] | None = None) -> None:
        self.budget = budget
        self.weights = weights or {}
        self.fair = Fair()
        self.queues: dict[JobName, list[Header]] = {}
        self.vtimes: dict[JobName, float] = {}
        self.counts: Counter[JobName] = Counter()

    def submit(self, job: JobName, ops: Iterable[Op]) -> None:
        for each in ops:
            op, tokens = (each, 0) if isinstance(each, str) else each
            self.counts[job] += 1
            self.queues.setdefault(job, []).append(Header(self.counts[job], op, tokens))

    def cycle(self) -> Cycle:
        jobs = [
            policy.Job(tenant, name, tuple(queue), self.vtimes.get((tenant, name), 0.0))
            for (tenant, name), queue in self.queues.items()
            if queue
        ]
        weights = {tenant: self.weights.get(tenant, 1.0) for tenant, _ in self.queues}
        turns, self.fair = select(self.fair, weights, jobs, self.budget)
        for turn in turns:
            job = turn.job.tenant, turn.job.name
            self.vtimes[job] = turn.job.vtime
            assert list(turn.requests) == self.queues[job][: len(turn.requests)]
            del self.queues[job][: len(turn.requests)]
        self.tokens = sum(turn.tokens for turn in turns)
        return [(turn.job.name, [header.seq for header in turn.requests]) for turn in turns]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    pool = Pool(case.budget, dict(case.weights))
    for job, ops in case.queues.items():
        pool.submit(job, ops)
    assert [pool.cycle() for _ in case.cycles] == list(case.cycles)
    assert pool.cycle() == []


# -- what one job gives -----------------------------------------------------------------------------------------------

OPS = ["init", "load_state", "forward", "forward_backward", "optim_step", "save_state", "save_weights", "end", "other"]
LETTERS = dict(zip(OPS, "iiccosse" + "c", strict=True))
headers = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 120)), max_size=20).map(
    lambda rows: [Header(seq, op, tokens) for seq, (op, tokens) in enumerate(rows, 1)]
)


def letters(requests: Iterable[Header]) -> str:
    return "".join(LETTERS[header.op] for header in requests)


@given(headers)
def test_without_a_budget_the_prefix_is_the_longest_that_matches_the_grammar(queue: list[Header]) -> None:
    taken = prefix(queue, 10**9, True)
    longest = max(n for n in range(len(queue) + 1) if re.fullmatch("i?c*o?s*e?", letters(queue[:n])))
    assert list(taken) == queue[:longest]


@given(headers, st.integers(0, 100), st.booleans())
def test_the_prefix_starts_at_the_head_and_keeps_to_the_budget(queue: list[Header], left: int, empty: bool) -> None:
    taken = list(prefix(queue, left, empty))
    assert taken == queue[: len(taken)]
    assert re.fullmatch("i?c*o?s*e?", letters(taken))
    sizes = [header.tokens for header in taken if header.tokens]
    assert sum(sizes) <= left or (empty and len(sizes) == 1)
    if empty and queue:
        assert taken


# -- which jobs get a turn --------------------------------------------------------------------------------------------

job_names = st.sampled_from([(f"t{t}", f"j{t}{j}") for t in range(3) for j in range(4)])
ops = st.tuples(st.sampled_from(OPS[:-2]), st.integers(0, 120)).map(
    lambda row: row if row[0] in ("forward", "forward_backward") else row[0]
)
queues = st.dictionaries(job_names, st.lists(ops, min_size=1, max_size=8), min_size=1, max_size=8)


@given(queues, st.integers(1, 150))
def test_everything_runs_once_in_order_and_no_cycle_is_empty_before(
    queues: dict[JobName, list[Op]], budget: int
) -> None:
    pool = Pool(budget)
    for job, requests in queues.items():
        pool.submit(job, requests)
    ran: dict[str, list[int]] = {name: [] for _, name in queues}
    while any(pool.queues.values()):
        cycle = pool.cycle()
        assert cycle, "work was left and nothing ran"
        assert len({name for name, _ in cycle}) == len(cycle), "a job ran twice in a cycle"
        for name, seqs in cycle:
            ran[name] += seqs
    assert ran == {name: list(range(1, len(requests) + 1)) for (_, name), requests in queues.items()}


@given(queues, st.integers(1, 150))
def test_a_cycle_exceeds_its_budget_only_by_a_single_request(queues: dict[JobName, list[Op]], budget: int) -> None:
    pool = Pool(budget)
    for job, requests in queues.items():
        pool.submit(job, requests)
    while any(pool.queues.values()):
        before = {(job[1], h.seq): h.tokens for job, queue in pool.queues.items() for h in queue}
        sizes = [before[name, seq] for name, seqs in pool.cycle() for seq in seqs if before[name, seq]]
        assert sum(sizes) <= budget or len(sizes) == 1


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=6),
    st.lists(st.integers(1, 100), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_no_job_starves(sizes: list[int], other_sizes: list[int], seed: int) -> None:
    """Every job always has work, of its own size; the others never hold one up for longer than all of them take."""
    pool = Pool(100)
    jobs = {("t0", f"a{n}"): size for n, size in enumerate(sizes)}
    jobs |= {("t1", f"b{n}"): size for n, size in enumerate(other_sizes)}
    order = list(jobs)
    random.Random(seed).shuffle(order)
    last = dict.fromkeys((name for _, name in order), 0)
    patience = 4 * len(jobs)  # two tenants, and cycles that sizes fill by half only
    for number in range(1, 100):
        for job in order:
            if len(pool.queues.get(job, [])) < 2:
                pool.submit(job, [("forward_backward", jobs[job])])
        for name, _ in pool.cycle():
            last[name] = number
        assert number - min(last.values()) <= patience


def test_a_large_job_of_a_tenant_with_small_ones_is_not_starved_by_a_third() -> None:
    pool = Pool(100)
    pool.submit(("a", "large"), [("forward_backward", 100)] * 40)
    large = 0
    for _ in range(40):
        pool.submit(("a", "small"), [("forward_backward", 50)])
        pool.submit(("b", "tiny"), [("forward_backward", 1)])
        large += any(name == "large" for name, _ in pool.cycle())
    assert large >= 10


def test_fifty_jobs_with_room_for_eight_get_their_share_within_one_over_a_hundred_cycles() -> None:
    pool = Pool(80)
    jobs = [(f"t{n % 5}", f"j{n:02}") for n in range(50)]
    for job in jobs:
        pool.submit(job, [("forward_backward", 10), "optim_step"] * 100)
    ran: Counter[str] = Counter()
    for _ in range(100):
        cycle = pool.cycle()
        assert len(cycle) == 8
        ran.update(name for name, _ in cycle)
    assert all(abs(ran[name] - 100 * 8 / 50) <= 1 for _, name in jobs)


def test_one_request_beside_a_thousand_runs_in_the_next_cycle() -> None:
    pool = Pool(100)
    for n in range(10):
        pool.submit(("big", f"big{n}"), [("forward_backward", 100), "optim_step"] * 50)
    for _ in range(7):
        pool.cycle()
    pool.submit(("small", "only"), [("forward_backward", 10), "optim_step"])
    assert ("only", [1, 2]) in pool.cycle()


@pytest.mark.parametrize("size", [10, 33, 100])
def test_weights_of_one_to_three_give_shares_of_one_to_three(size: int) -> None:
    pool = Pool(100, {"one": 1.0, "three": 3.0})
    tokens: Counter[str] = Counter()
    for tenant in ("one", "three"):
        for n in range(4):
            pool.submit((tenant, f"{tenant}{n}"), [("forward_backward", size)] * 600)
    for _ in range(200):
        for name, seqs in pool.cycle():
            tokens[name.rstrip("0123")] += size * len(seqs)
    assert tokens["three"] / tokens["one"] == pytest.approx(3, rel=0.05)


def test_a_job_that_slept_has_no_claim_saved_up() -> None:
    pool = Pool(100)
    busy, sleeper = ("t", "busy"), ("t", "sleeper")
    pool.submit(sleeper, [("forward_backward", 100)])
    for _ in range(20):
        pool.submit(busy, [("forward_backward", 100)])
        pool.cycle()
    pool.submit(busy, [("forward_backward", 100)] * 10)
    pool.submit(sleeper, [("forward_backward", 100)] * 10)
    names = [pool.cycle()[0][0] for _ in range(8)]
    assert abs(names.count("busy") - names.count("sleeper")) <= 1


def test_a_tenant_that_slept_has_no_claim_saved_up() -> None:
    pool = Pool(100)
    pool.submit(("sleeper", "s"), [("forward_backward", 100)])
    for _ in range(20):
        pool.submit(("busy", "b"), [("forward_backward", 100)])
        pool.cycle()
    pool.submit(("busy", "b"), [("forward_backward", 100)] * 10)
    pool.submit(("sleeper", "s"), [("forward_backward", 100)] * 10)
    names = [pool.cycle()[0][0] for _ in range(8)]
    assert abs(names.count("b") - names.count("s")) <= 1


# -- where new jobs go ------------------------------------------------------------------------------------------------


def test_a_job_goes_to_the_worker_with_the_fewest_jobs_then_with_the_least_load() -> None:
    workers = [Worker("w1", 9, jobs=2), Worker("w2", 9, jobs=1, load=50.0), Worker("w3", 9, jobs=1, load=5.0)]
    placed, unplaced = place({"t": ["a", "b", "c"]}, workers)
    assert placed == {("t", "a"): "w3", ("t", "b"): "w2", ("t", "c"): "w1"}
    assert unplaced == 0


def test_no_worker_gets_more_jobs_than_it_has_slots() -> None:
    placed, unplaced = place({"t": ["a", "b", "c", "d"]}, [Worker("w1", 1), Worker("w2", 2)])
    assert Counter(placed.values()) == {"w1": 1, "w2": 2}
    assert unplaced == 1
    assert place({"t": ["a"]}, []) == ({}, 1)


def test_tenants_take_turns_at_slots() -> None:
    placed, unplaced = place({"big": [f"b{n}" for n in range(10)], "small": ["s"]}, [Worker("w", 3)])
    assert set(placed) == {("big", "b0"), ("small", "s"), ("big", "b1")}
    assert unplaced == 8


def test_a_tick_places_a_bounded_number() -> None:
    placed, unplaced = place({"t": [f"j{n}" for n in range(1000)]}, [Worker("w", 2000)])
    assert (len(placed), unplaced) == (policy.PLACE_LIMIT, 1000 - policy.PLACE_LIMIT)


# -- when the boundary of an idle pool closes -------------------------------------------------------------------------


def test_a_gather_that_has_not_started_does_not_wait() -> None:
    assert Gather().wait_ms(123.0) == 0


def test_the_window_closes_when_nothing_more_arrives() -> None:
    gather = Gather(5, 25)
    gather.started(100)
    assert [gather.wait_ms(now) for now in (100, 103, 105, 200)] == [5, 2, 0, 0]


def test_each_arrival_extends_the_window() -> None:
    gather = Gather(5, 25)
    gather.started(100)
    gather.arrived(104)
    assert [gather.wait_ms(now) for now in (104, 108, 109)] == [5, 1, 0]


def test_arrivals_cannot_hold_it_open_for_ever() -> None:
    gather = Gather(5, 25)
    gather.started(100)
    for now in range(101, 125):
        gather.arrived(now)
        assert gather.wait_ms(now) == min(5, 125 - now)
    gather.arrived(125)
    assert gather.wait_ms(125) == 0


@given(st.lists(st.floats(0, 50), max_size=40), st.floats(0, 50), st.floats(0, 50))
def test_the_wait_depends_on_the_arrivals_alone(arrivals: list[float], window: float, limit: float) -> None:
    gather = Gather(window, limit)
    gather.started(1000)
    for now in sorted(arrivals):
        gather.arrived(1000 + now)
    closes = 1000 + min(max([0, *arrivals]) + window, limit)
    for now in (1000.0, 1010.0, 1100.0):
        assert gather.wait_ms(now) == pytest.approx(max(closes - now, 0))


def test_it_can_be_used_again() -> None:
    gather = Gather(5, 25)
    gather.started(0)
    gather.arrived(20)
    gather.started(1000)
    assert gather.wait_ms(1004) == 1
