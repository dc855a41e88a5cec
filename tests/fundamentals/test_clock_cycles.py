"""The story of clock cycles, told by running it.

A pool advances in cycles. What arrives during cycle N is eligible at N + 1. So how many cycles an update takes is decided
by when its two requests are submitted: that is all a client has to understand.

Two numbers describe a loop: the *span* of an update (cycles from its first request to its last) and the *period* (cycles
from one update to the next).
"""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

import mainspring as trio
from tests.fundamentals import programs
from tests.fundamentals.conftest import busy_pool, make_batch

pytestmark = pytest.mark.timeout(600)  # a cycle lasts as long as its work, on a busy machine much longer

UPDATES = 20
ADAM = trio.AdamParams(learning_rate=1e-4)


def span_and_period(updates: list[tuple[trio.APIFuture, trio.APIFuture]]) -> tuple[float, float]:
    """Medians over a run: cycles of one update, and cycles from update to update."""
    spans = [optim.cycle - fwdbwd.cycle + 1 for fwdbwd, optim in updates]
    periods = [second[0].cycle - first[0].cycle for first, second in pairwise(updates)]
    return statistics.median(spans), statistics.median(periods)


async def test_a_future_has_two_awaits_and_knows_its_cycle(training_client):
    """The first await submits; the second waits for the result, which carries the number of its cycle."""
    future = await training_client.forward_backward_async(make_batch(), "cross_entropy")
    assert isinstance(future, trio.APIFuture)

    result = await future
    assert result.metrics["token_count"] == 16
    assert future.cycle > 0
    await (await training_client.optim_step_async(ADAM))


async def test_submit_and_wait_one_at_a_time_spans_three_cycles(client, training_client):
    """The optim_step is submitted when the next cycle already runs, so it misses it."""
    updates = []
    with busy_pool(client):
        for _ in range(UPDATES):
            fwdbwd, optim, _ = await programs.submit_and_wait(training_client, make_batch(), ADAM)
            updates.append((fwdbwd, optim))
    assert span_and_period(updates) == (3, 4)


async def test_submit_first_then_wait_takes_one_cycle(client, training_client):
    """Both requests are in the queue before the client waits: the update is one cycle's work."""
    updates = []
    with busy_pool(client):
        for _ in range(UPDATES):
            fwdbwd, optim, _ = await programs.submit_first_then_wait(training_client, make_batch(), ADAM)
            updates.append((fwdbwd, optim))
    assert span_and_period(updates) == (1, 2)


async def test_one_batch_of_lookahead_leaves_no_cycle_out(client, training_client, monkeypatch):
    """While update N runs, update N + 1 already waits: each cycle has one."""
    updates = []
    submit_update = programs.submit_update

    async def remember(*args):
        updates.append(await submit_update(*args))
        return updates[-1]

    monkeypatch.setattr(programs, "submit_update", remember)
    with busy_pool(client):
        results = await programs.train_pipelined(training_client, [make_batch()] * UPDATES, 1e-4)
    assert len(results) == UPDATES
    assert span_and_period(updates) == (1, 1)


async def test_a_pair_lands_in_one_cycle_on_an_idle_pool_too(training_client):
    """The idle clock gathers for a moment after the first request, so that the second is there in time."""
    updates = []
    for _ in range(UPDATES):
        fwdbwd, optim, _ = await programs.submit_first_then_wait(training_client, make_batch(), ADAM)
        updates.append((fwdbwd, optim))
    assert span_and_period(updates)[0] == 1
    assert all(fwdbwd.cycle == optim.cycle for fwdbwd, optim in updates)


async def test_many_forward_backwards_make_one_update(client, training_client):
    """Gradients add up until the optim_step: accumulation is nothing but more requests before it."""
    with busy_pool(client):
        parts = [await training_client.forward_backward_async(make_batch(), "cross_entropy") for _ in range(4)]
        optim = await training_client.optim_step_async(ADAM)
        await optim
    assert max(part.cycle for part in parts) <= optim.cycle


async def test_the_next_updates_forward_waits_for_the_next_cycle(client, training_client):
    """What reads weights never shares a cycle with an optim_step before it, so it sees the new weights."""
    with busy_pool(client):
        first = await programs.submit_update(training_client, make_batch(), trio.AdamParams(learning_rate=1e-2))
        second = await programs.submit_update(training_client, make_batch(), ADAM)
        losses = [(await future).metrics["loss_sum"] for future in (first[0], second[0])]
    assert second[0].cycle > first[1].cycle
    assert losses[1] < losses[0]
