"""What `training_client.cycle_report()` says of the programs of the page on clock cycles."""

from __future__ import annotations

import pytest

import mainspring as trio
from mainspring import AdviceCode
from tests.fundamentals import programs
from tests.fundamentals.conftest import busy_pool, make_batch

pytestmark = pytest.mark.timeout(600)

UPDATES = 6
ADAM = trio.AdamParams(learning_rate=1e-4)


async def test_submit_and_wait_is_told_to_submit_both_first(client, training_client):
    with busy_pool(client):
        for _ in range(UPDATES):
            await programs.submit_and_wait(training_client, make_batch(), ADAM)
    report = training_client.cycle_report()
    assert (report.code, report.span, report.period) == (AdviceCode.SUBMIT_BOTH_FIRST, 3, 4)
    assert "submit both first and each update takes 1 cycle, not 3" in report.advice
    assert report.idle_cycles > UPDATES / 2  # nearly one an update; a boundary is caught now and then


async def test_submit_first_then_wait_is_told_to_look_ahead(client, training_client):
    with busy_pool(client):
        for _ in range(UPDATES):
            await programs.submit_first_then_wait(training_client, make_batch(), ADAM)
    report = training_client.cycle_report()
    assert (report.code, report.span, report.period) == (AdviceCode.LOOK_AHEAD, 1, 2)
    assert "submit the next batch before awaiting this one" in report.advice


async def test_lookahead_has_nothing_to_change(client, training_client):
    with busy_pool(client):
        await programs.train_pipelined(training_client, [make_batch()] * UPDATES, 1e-4)
    report = training_client.cycle_report()
    assert (report.code, report.span, report.period) == (AdviceCode.NOTHING_TO_CHANGE, 1, 1)
    assert report.client.ms == 0
    assert report.queued.share + report.compute.share == pytest.approx(1)


async def test_accumulating_batches_has_nothing_to_change(client, training_client):
    waiting: list[trio.APIFuture] = []
    with busy_pool(client):
        for _ in range(UPDATES):
            for _ in range(4):
                await training_client.forward_backward_async(make_batch(), "cross_entropy")
            waiting.append(await training_client.optim_step_async(ADAM))
            if len(waiting) > 1:
                await waiting.pop(0)
        await waiting.pop()
    report = training_client.cycle_report()
    assert (report.code, report.requests_per_update) == (AdviceCode.NOTHING_TO_CHANGE, 5)
    assert (report.span, report.period) == (1, 1)


async def test_a_job_that_waits_for_its_share_hears_that_the_pool_is_full(client, training_client):
    """Two neighbours of 1536 tokens and 768 of its own: one of the three fits into a cycle of 2048 at a time."""
    with busy_pool(client), busy_pool(client):
        await programs.train_pipelined(training_client, [make_batch(6, 128)] * UPDATES, 1e-4)
    report = training_client.cycle_report()
    assert (report.code, report.span) == (AdviceCode.POOL_FULL, 1)
    assert report.period > 1
    assert report.waited_cycles >= UPDATES - 1
    assert report.idle_cycles == 0
