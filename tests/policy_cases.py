"""One table of cases for the rules of a cycle: run against mainspring_clock.policy and against the Lua function tick.

A case is a pool with one worker: jobs with their queues, a token budget, and the seqs that each cycle runs, in the order
in which they were selected. The whole cycle is committed before the next one, and nothing new arrives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Op = str | tuple[str, int]  # an op, or an op with its tokens
JobName = tuple[str, str]  # tenant, job
Cycle = list[tuple[str, list[int]]]  # (job, seqs) in the order of selection


@dataclass(frozen=True)
class Case:
    name: str
    queues: Mapping[JobName, Sequence[Op]]
    cycles: Sequence[Cycle]
    budget: int = 1000
    weights: Mapping[str, float] = field(default_factory=dict)  # of tenants; 1 when not here


def fb(tokens: int) -> Op:
    return ("forward_backward", tokens)


A, B = ("acme", "a"), ("acme", "b")
X, Y = ("beta", "x"), ("gamma", "y")


def one(name: str, ops: Sequence[Op], cycles: Sequence[Sequence[int]], budget: int = 1000) -> Case:
    """A pool with a single job."""
    return Case(name, {A: ops}, [[("a", list(seqs))] for seqs in cycles], budget)


CASES = [
    # what one job gives
    one("an update is one cycle", [fb(10), "optim_step"], [[1, 2]]),
    one("two updates are two", [fb(10), "optim_step", fb(10), "optim_step"], [[1, 2], [3, 4]]),
    one("gradients accumulate within one", [fb(10), fb(10), "forward", fb(10), "optim_step"], [[1, 2, 3, 4, 5]]),
    one("init comes first", ["init", fb(10), "optim_step"], [[1, 2, 3]]),
    one("init starts a cycle of its own", [fb(10), "init", fb(10)], [[1], [2, 3]]),
    one("two loads are two cycles", ["init", "load_state", fb(10)], [[1], [2, 3]]),
    one("two steps are two cycles", ["optim_step", "optim_step"], [[1], [2]]),
    one("saves follow the step", [fb(10), "optim_step", "save_weights", "save_state"], [[1, 2, 3, 4]]),
    one("a forward after a save waits", ["save_weights", "save_state", ("forward", 5)], [[1, 2], [3]]),
    one("a forward after the step waits", ["optim_step", ("forward", 5)], [[1], [2]]),
    one("a step after a save waits", ["save_weights", "optim_step"], [[1], [2]]),
    one("the end comes last, in the same cycle", [fb(10), "optim_step", "save_weights", "end"], [[1, 2, 3, 4]]),
    one("an unknown operation keeps its place", [fb(10), "surprise", "optim_step", "surprise"], [[1, 2, 3], [4]]),
    one("256 requests are looked at", ["forward"] * 300, [list(range(1, 257)), list(range(257, 301))]),
    # tokens
    one(
        "what exceeds the budget is split between cycles", [fb(60), fb(40), fb(1), "optim_step"], [[1, 2], [3, 4]], 100
    ),
    one("a full budget leaves room for what has no tokens", [fb(100), "optim_step"], [[1, 2]], 100),
    one("a head larger than the budget runs alone", [fb(150), fb(1), "optim_step"], [[1], [2, 3]], 100),
    one("also behind an init", ["init", fb(150), "optim_step"], [[1, 2, 3]], 100),
    one("two such heads are two cycles", [fb(150), fb(150)], [[1], [2]], 100),
    # who shares
    Case("jobs run together", {A: [fb(10), "optim_step"], B: [fb(10)]}, [[("a", [1, 2]), ("b", [1])]]),
    Case("jobs of tenants too", {A: [fb(10)], X: [fb(10)], Y: [fb(10)]}, [[("a", [1]), ("x", [1]), ("y", [1])]]),
    Case("jobs take turns", {A: [fb(100), fb(100)], B: [fb(100)]}, [[("a", [1])], [("b", [1])], [("a", [2])]], 100),
    Case(
        "tenants take turns, however many jobs one has",
        {A: [fb(100)], B: [fb(100)], ("acme", "c"): [fb(100)], X: [fb(100)]},
        [[("a", [1])], [("x", [1])], [("b", [1])], [("c", [1])]],
        100,
    ),
    Case(
        "what does not fit leaves room for what does, and goes first next time",
        {A: [fb(60)], X: [fb(60)], Y: [fb(40)]},
        [[("a", [1]), ("y", [1])], [("x", [1])]],
        100,
    ),
    Case(
        "part of an update fits",
        {A: [fb(60)], X: [fb(30), fb(30), "optim_step"]},
        [[("a", [1]), ("x", [1])], [("x", [2, 3])]],
        100,
    ),
    Case(
        "a large batch is not kept waiting by small neighbours",
        {A: [fb(1), "optim_step"] * 3, X: [fb(100)]},
        [[("a", [1, 2])], [("x", [1])], [("a", [3, 4])], [("a", [5, 6])]],
        100,
    ),
    Case(
        "requests without tokens take turns too",
        {A: ["optim_step"] * 2, X: ["optim_step"]},
        [[("a", [1]), ("x", [1])], [("a", [2])]],
        1,
    ),
    Case(
        "a weight of three is three turns of four",
        {A: [fb(100)] * 3, X: [fb(100)] * 9},
        [
            [("a", [1])],
            *[[("x", [n])] for n in (1, 2, 3)],
            [("a", [2])],
            *[[("x", [n])] for n in (4, 5, 6)],
            [("a", [3])],
            *[[("x", [n])] for n in (7, 8, 9)],
        ],
        100,
        {"beta": 3.0},
    ),
]
