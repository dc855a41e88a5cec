"""Futures, without a service."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future

import pytest

import mainspring as trio
from mainspring.futures import PendingCall
from mainspring_broker.wire import Envelope


class Host:
    """A client that blocks nobody and cancels nothing."""

    def check_may_block(self):
        pass

    def expect(self, call):
        pass

    def start_cancel(self, call):
        future = Future()
        future.set_result(False)
        return future


def pending(parts=1, init=None, join=lambda results: results):
    call = PendingCall("job", join, init)
    for _ in range(parts):
        call.add_part("forward_backward", 1)
    return call, trio.APIFuture(Host(), call, call.outcome)


def done(value=None, cycle=7, compute_ms=2.0):
    return Envelope({"value": value}, None, cycle, 1.0, compute_ms, "w")


def failed(error):
    return Envelope(None, error.to_wire(), 7, 1.0, 2.0, "w")


def test_a_result_is_read_as_often_as_one_likes():
    call, future = pending()
    assert not future.done()
    call.part_answered(0, done(1))
    assert [future.result(), future.result(timeout=0), future.exception()] == [[{"value": 1}], [{"value": 1}], None]


def test_waiting_ends_with_the_timeout_and_the_request_goes_on():
    call, future = pending()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.001)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0.001)
    call.part_answered(0, done(1))
    assert future.result() == [{"value": 1}]


async def test_awaiting_with_a_timeout_leaves_nothing_behind():
    call, future = pending()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.001)
    assert len(future._waiters) == 0
    call.part_answered(0, done(1))
    assert await future == await future == [{"value": 1}]


async def test_a_cancelled_await_does_not_disturb_another():
    call, future = pending()
    first, second = asyncio.ensure_future(future.result_async()), asyncio.ensure_future(future.result_async())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    call.part_answered(0, done(1))
    assert await second == [{"value": 1}]


def test_many_threads_and_event_loops_wait_for_one_future():
    call, future = pending()
    results, ready = [], threading.Barrier(7)

    def block():
        ready.wait()
        results.append(future.result(timeout=30))

    async def wait():
        results.append(await future)

    def run_loop():
        ready.wait()
        asyncio.run(wait())

    threads = [threading.Thread(target=target) for target in (block, run_loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    ready.wait()
    call.part_answered(0, done(1))
    for thread in threads:
        thread.join()
    assert results == [[{"value": 1}]] * 6


def test_an_event_loop_that_was_closed_meanwhile_is_no_trouble():
    call, future = pending()

    async def give_up():
        future._waiters.add()

    asyncio.run(give_up())
    call.part_answered(0, done(1))
    assert future.result() == [{"value": 1}]


@pytest.mark.filterwarnings("error")
def test_a_failed_future_that_nobody_looks_at_is_silent(caplog, capsys):
    call, future = pending()
    call.part_answered(0, failed(trio.OutOfMemory("too big")))
    del call, future
    gc.collect()
    assert (caplog.text, capsys.readouterr().err) == ("", "")


def test_the_error_of_a_request_is_raised_with_its_details():
    call, future = pending()
    call.part_answered(0, failed(trio.TokenOutOfRange("datum 3: no such token", datum=3)))
    with pytest.raises(trio.TokenOutOfRange) as caught:
        future.result()
    assert caught.value.details == {"datum": 3}
    assert "failed" in repr(future)


def test_a_future_knows_its_story():
    call, future = pending(parts=3)
    assert (future.cycle, future.cycles, future.timings) == (None, None, None)
    for part, (seq, cycle, ms) in enumerate([(4, 7, 2.0), (5, 7, 2.0), (6, 8, 3.0)]):
        call.part_accepted(part, seq)
        call.part_answered(part, done(part, cycle, ms))
    assert (future.cycle, future.cycles) == (8, (7, 8))
    assert future.seqs == (4, 5, 6)
    assert future.request_ids == ("job:4", "job:5", "job:6")
    assert (future.timings.queued_ms, future.timings.compute_ms) == (1.0, 5.0)  # two parts shared one cycle
    assert future.timings.total_ms >= 0
    assert "cycle 8" in repr(future)


def test_parts_are_joined_in_their_order_whatever_order_they_come_in():
    call, future = pending(parts=3)
    for part in (2, 0, 1):
        assert not future.done()
        call.part_answered(part, done(part))
    assert future.result() == [{"value": 0}, {"value": 1}, {"value": 2}]


def test_any_failed_part_fails_the_whole_with_its_own_error():
    call, future = pending(parts=3)
    call.part_answered(0, done())
    call.part_answered(1, failed(trio.TokenOutOfRange("datum 3")))
    call.part_answered(2, failed(trio.OutOfMemory("too big")))
    with pytest.raises(trio.TokenOutOfRange):
        future.result()


def test_the_first_await_ends_when_all_parts_are_accepted():
    call, _ = pending(parts=2)
    call.part_accepted(0, 4)
    call.part_accepted(0, 4)  # sent again after a restart of Redis
    assert not call.accepted.done()
    call.part_accepted(1, 5)
    assert call.accepted.done()


def test_a_repeated_result_changes_nothing():
    call, future = pending()
    call.part_answered(0, done(1))
    call.part_answered(0, done(2))
    call.fail(trio.ServiceClosed("closed"))
    assert future.result() == [{"value": 1}]


def test_map_transforms_the_result_and_keeps_error_and_story():
    call, future = pending()
    doubled, wrong = future.map(lambda results: results[0]["value"] * 2), future.map(lambda results: 1 / 0)
    call.part_accepted(0, 4)
    call.part_answered(0, done(21))
    assert (doubled.result(), doubled.cycle, doubled.seqs) == (42, 7, (4,))
    with pytest.raises(ZeroDivisionError):
        wrong.result()

    call, future = pending()
    mapped = future.map(lambda results: results)
    call.part_answered(0, failed(trio.OutOfMemory("too big")))
    with pytest.raises(trio.OutOfMemory):
        mapped.result()


def test_callbacks_are_called_with_the_future_also_when_it_is_done():
    call, future = pending()
    seen = []
    future.add_done_callback(seen.append)
    assert seen == []
    call.part_answered(0, done())
    future.add_done_callback(seen.append)
    assert seen == [future, future]


@pytest.mark.parametrize("init_first", [True, False])
def test_a_job_that_never_opened_says_why(init_first):
    init, _ = pending()
    call, future = pending(init=init)
    refuse_init = lambda: init.part_answered(0, failed(trio.InvalidHyperparameter("rank 65 is above 64")))  # noqa: E731
    lost = lambda: call.part_answered(0, failed(trio.StateLost("job is not here")))  # noqa: E731
    for step in (refuse_init, lost) if init_first else (lost, refuse_init):
        assert not future.done()
        step()
    with pytest.raises(trio.StateLost, match="rank 65 is above 64") as caught:
        future.result()
    assert isinstance(caught.value.__cause__, trio.InvalidHyperparameter)


def test_state_lost_of_an_open_job_is_just_that():
    init, _ = pending()
    init.part_answered(0, done())
    call, future = pending(init=init)
    call.part_answered(0, failed(trio.StateLost("the worker is gone")))
    with pytest.raises(trio.StateLost, match="the worker is gone"):
        future.result()


def test_a_result_that_cannot_be_read_is_an_error_and_not_a_hang():
    call, future = pending(join=lambda results: results[0]["no such field"])
    call.part_answered(0, done())
    with pytest.raises(trio.InternalError):
        future.result()
