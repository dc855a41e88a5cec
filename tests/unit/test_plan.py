"""The plan: canonical order, cuts between datums, runs of equal jobs, attention groups of equal length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring_workers.plan import BatchPlan, PlanRequest, Run, build_plan, plan_attention
from mainspring_workers.validate import IGNORED, Batch


def request(job: str, seq: int, lengths: Sequence[int], group: int = 8, ignored: Sequence[int] = ()) -> PlanRequest:
    """Tokens count up from 1000 · seq, so that each is known again."""
    total = sum(lengths)
    tokens = np.arange(total, dtype=np.int64) + 1000 * seq
    targets = tokens.copy()
    targets[list(ignored)] = IGNORED
    batch = Batch(
        tokens, np.array(lengths, np.int32), targets, {"weights": np.ones(total, np.float32)}, "ce", (), total
    )
    return PlanRequest((group,), job, seq, batch)


def micro_sizes(plan: BatchPlan) -> list[int]:
    return [micro.end - micro.start for micro in plan.micro_batches]


def test_order_is_group_job_seq_whatever_the_order_of_arrival() -> None:
    requests = [request("b", 1, [2]), request("a", 3, [2]), request("c", 5, [2], group=4), request("a", 2, [2])]
    plan = build_plan(requests, 100)
    assert plan.tokens.tolist() == [5000, 5001, 2000, 2001, 3000, 3001, 1000, 1001]
    assert plan.groups == (("c",), ("a", "b"))
    for given_request, (start, end) in zip(requests, plan.spans, strict=True):
        assert plan.tokens[start:end].tolist() == given_request.batch.tokens.tolist()
    shuffled = build_plan(requests[::-1], 100)
    assert shuffled.tokens.tolist() == plan.tokens.tolist()
    assert shuffled.micro_batches[0].runs == plan.micro_batches[0].runs


def test_positions_start_again_in_each_sequence() -> None:
    assert build_plan([request("a", 1, [3, 1, 2])], 100).positions.tolist() == [0, 1, 2, 0, 0, 1]


def test_micro_batches_are_cut_between_datums_and_a_long_datum_is_alone() -> None:
    plan = build_plan([request("a", 1, [4, 4, 4]), request("b", 2, [30, 1, 1])], 10)
    assert micro_sizes(plan) == [8, 4, 30, 2]
    assert plan.micro_batches[1].runs == (Run(0, 0, 1, 0, 4),)


def test_equal_neighbours_of_a_group_become_one_run() -> None:
    requests = [request(job, 1, lengths) for job, lengths in (("a", [4]), ("b", [1, 3]), ("c", [4]), ("d", [5]))]
    assert build_plan(requests, 100).micro_batches[0].runs == (Run(0, 0, 3, 0, 12), Run(0, 3, 4, 12, 17))


def test_equal_jobs_of_different_groups_stay_apart() -> None:
    requests = [request("a", 1, [4], group=8), request("b", 1, [4], group=16)]
    assert build_plan(requests, 100).micro_batches[0].runs == (Run(0, 0, 1, 0, 4), Run(1, 0, 1, 4, 8))


def test_ignored_targets_are_left_out_of_the_head_by_selection() -> None:
    plan = build_plan([request("a", 1, [4], ignored=[0, 2]), request("b", 2, [2], ignored=[0, 1])], 100)
    (micro,) = plan.micro_batches
    assert micro.head_rows is not None
    assert micro.head_rows.tolist() == [1, 3]
    assert micro.head_runs == (Run(0, 0, 1, 0, 2),)
    assert [(run.start, run.end) for run in micro.loss_runs] == [(0, 2)]


def test_requests_with_the_same_loss_share_a_loss_run() -> None:
    (micro,) = build_plan([request("a", 1, [4]), request("b", 2, [2])], 100).micro_batches
    assert [(run.start, run.end) for run in micro.loss_runs] == [(0, 6)]
    assert micro.head_rows is None


def test_attention_groups_hold_sequences_of_exactly_equal_length() -> None:
    plan = plan_attention(np.array([3, 1, 3]))
    assert plan.groups == ((1, 1), (2, 3))
    assert plan.order is not None
    assert plan.inverse is not None
    assert plan.order.tolist() == [3, 0, 1, 2, 4, 5, 6]
    assert np.arange(7)[plan.order][plan.inverse].tolist() == list(range(7))
    assert plan_attention(np.array([1, 3, 3])).order is None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcde"), st.sampled_from([4, 8]), st.lists(st.integers(1, 9), min_size=1, max_size=5)
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 40),
)
def test_any_plan_covers_every_row_once(rows: list[tuple[str, int, list[int]]], budget: int) -> None:
    groups = {job: group for job, group, _ in rows}
    requests = [request(job, seq, lengths, groups[job]) for seq, (job, _, lengths) in enumerate(rows)]
    plan = build_plan(requests, budget)
    ends = [micro.end for micro in plan.micro_batches]
    assert [micro.start for micro in plan.micro_batches] == [0, *ends[:-1]]
    assert ends[-1] == len(plan.tokens) == sum(sum(lengths) for _, _, lengths in rows)
    owner = {}
    for item, (start, end) in zip(requests, plan.spans, strict=True):
        assert plan.tokens[start:end].tolist() == item.batch.tokens.tolist()
        owner.update(dict.fromkeys(range(start, end), item.job))
    for micro in plan.micro_batches:
        assert sum(count * length for count, length in micro.attention.groups) == micro.end - micro.start
        assert micro.end - micro.start <= budget or sum(count for count, _ in micro.attention.groups) == 1
        covered = 0
        for run in micro.runs:
            assert run.start == covered
            covered = run.end
            each = (run.end - run.start) // (run.last - run.first)
            for j in range(run.first, run.last):
                first = micro.start + run.start + (j - run.first) * each
                assert {owner[row] for row in range(first, first + each)} == {plan.groups[run.group][j]}
        assert covered == micro.end - micro.start
