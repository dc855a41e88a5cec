"""Cycle reports of several kinds of client against the fake service, with a neighbour who keeps every cycle filled.

Clients that wait between their requests are in tests/fundamentals/test_cycle_report.py, against real processes: here the
clock is a thread beside the client, which may win the race for a boundary and do better than it should.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import mainspring as trio
from tests.conftest import Server
from tests.fake_service import FakeService, make_batch, serving
from tests.fundamentals import programs

UPDATES = 10
ADAM = trio.AdamParams(learning_rate=1e-4)
CYCLE_S = 0.08  # long against the time that a client needs to react
BUDGET = 100  # tokens of a cycle


@pytest.fixture
def service(server: Server, pool: str) -> Iterator[FakeService]:
    with serving(server.url, pool) as running:
        running.cycle_s, running.budget_tokens = CYCLE_S, BUDGET
        yield running


@pytest.fixture
def client(server: Server, pool: str, service: FakeService) -> Iterator[trio.ServiceClient]:
    with trio.ServiceClient(server.url, pool=pool) as connected:
        yield connected


@pytest.fixture
def training_client(client: trio.ServiceClient) -> trio.TrainingClient:
    return client.create_lora_training_client("tiny", rank=8)


@contextmanager
def busy(client: trio.ServiceClient, tokens: int = 4) -> Iterator[None]:
    """Another job with an update for each cycle, of so many tokens."""
    stopping = threading.Event()
    neighbour = client.create_lora_training_client("tiny", rank=8)
    batch = make_batch(tokens=tokens)

    def fill() -> None:
        waiting: list[trio.APIFuture[trio.OptimStepResponse]] = []
        while not stopping.is_set():
            neighbour.forward_backward(batch, "cross_entropy")
            waiting.append(neighbour.optim_step(ADAM))
            if len(waiting) > 5:
                waiting.pop(0).result(60)
        for future in waiting:
            future.result(60)

    thread = threading.Thread(target=fill)
    thread.start()
    neighbour.forward(batch, "cross_entropy").result(60)
    try:
        yield
    finally:
        stopping.set()
        thread.join()


async def test_one_batch_of_lookahead(client, training_client):
    with busy(client):
        await programs.train_pipelined(training_client, [make_batch()] * UPDATES, 1e-4)
    report = training_client.cycle_report()
    assert report.code is trio.AdviceCode.NOTHING_TO_CHANGE
    assert (report.span, report.period) == (1, 1)
    assert report.client.ms == 0


async def accumulate(training_client: trio.TrainingClient) -> list[trio.APIFuture]:
    parts = [await training_client.forward_backward_async(make_batch(), "cross_entropy") for _ in range(3)]
    return [*parts, await training_client.optim_step_async(ADAM)]


async def test_accumulating(client, training_client):
    with busy(client):
        futures = [future for _ in range(UPDATES) for future in await accumulate(training_client)]
        for future in futures:
            await future
    report = training_client.cycle_report()
    assert report.code is trio.AdviceCode.NOTHING_TO_CHANGE
    assert (report.span, report.period, report.requests_per_update) == (1, 1, 4)


async def test_accumulating_one_after_another(training_client):
    for _ in range(UPDATES):
        for _ in range(3):
            await (await training_client.forward_backward_async(make_batch(), "cross_entropy"))
        await (await training_client.optim_step_async(ADAM))
    report = training_client.cycle_report()
    assert report.code is trio.AdviceCode.SEND_TOGETHER
    assert (report.span, report.requests_per_update) == (4, 4)
    assert "send them together before the optim_step" in report.advice


async def test_starved(client, training_client):
    """Of three jobs, each as large as a cycle, one runs at a time."""
    batch = make_batch(tokens=60)
    with busy(client, tokens=60), busy(client, tokens=60):
        await programs.train_pipelined(training_client, [batch] * UPDATES, 1e-4)
    report = training_client.cycle_report()
    assert report.code is trio.AdviceCode.POOL_FULL
    assert report.span == 1
    assert report.period >= 2
    assert report.waited_cycles >= UPDATES
    assert "for their share" in report.advice


async def test_failed_requests_are_counted_and_the_report_says_so(training_client):
    await (await training_client.optim_step_async(ADAM))
    bad = await training_client.forward_backward_async([], "cross_entropy")
    step = await training_client.optim_step_async(ADAM)
    for future in (bad, step):
        with pytest.raises(trio.RequestError):
            await future
    report = training_client.cycle_report()
    assert (report.updates, report.failed_requests) == (1, 2)
    assert "2 requests failed" in str(report)


async def test_a_report_may_be_asked_for_at_any_time_and_is_bounded(service, training_client):
    assert training_client.cycle_report().updates == 0
    with service.paused():
        futures = await accumulate(training_client)
        assert training_client.cycle_report().code is trio.AdviceCode.TOO_EARLY
    for future in futures:
        await future
    for _ in range(4):
        for future in await accumulate(training_client):
            await future
    assert training_client.cycle_report().updates == 5
    assert training_client.cycle_report(updates=2).updates == 2
