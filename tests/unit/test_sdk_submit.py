"""One job's way into its stream, against a stream in memory that answers as submit.lua does."""

from __future__ import annotations

import asyncio
import random

import pytest

import mainspring as trio
from mainspring.futures import PendingCall
from mainspring.submit import JobSender, Request
from mainspring.transport import Progress
from mainspring_broker.functions import JobHead, chain_next
from mainspring_broker.wire import Envelope
from tests.helpers import wait_until_async


class Stream:
    """What Redis keeps of a job, and a connection to it. `replies` stand in for the next true ones, None for none."""

    def __init__(self, backlog=None):
        self.backlog = backlog
        self.chains = ["start"]  # after each seq
        self.accepted = []  # (op, digest) of each seq
        self.done_seq = 0
        self.calls = []  # how many requests each pipeline had
        self.replies = []
        self.open = asyncio.Event()
        self.open.set()

    @property
    def last_seq(self):
        return len(self.accepted)

    def head(self, status):
        return JobHead(status, self.last_seq, self.chains[-1], self.done_seq)

    async def submit(self, job, writer, requests):
        self.calls.append(len(requests))
        await self.open.wait()
        return [self.submit_one(request) for request in requests]

    def submit_one(self, request):
        if self.replies and (reply := self.replies.pop(0)):
            return reply
        if request.seq <= self.last_seq:
            assert self.accepted[request.seq - 1][1] == request.digest
            return self.head("have")
        if request.seq > self.last_seq + 1:
            return self.head("gap")
        if request.chain != self.chains[-1]:
            return trio.HistoryDiverged("other history")
        if self.backlog is not None and self.last_seq - self.done_seq >= self.backlog:
            return self.head("full")
        self.accepted.append((request.op, request.digest))
        self.chains.append(chain_next(request.chain, request.digest))
        return self.head("accepted")

    def roll_back(self, last_seq):
        del self.accepted[last_seq:], self.chains[last_seq + 1 :]
        self.done_seq = min(self.done_seq, last_seq)

    @property
    def ops(self):
        return [op for op, _ in self.accepted]


def sender_to(stream):
    return JobSender(stream, "job", "writer", stream.head("created"))


def call_of(*ops):
    call = PendingCall("job", lambda results: results, None)
    return call, [Request.of(call, op, 0, op.encode()) for op in ops]


def send(sender, *ops):
    call, requests = call_of(*ops)
    sender.enqueue(requests)
    return call


async def accepted(*calls):
    await asyncio.gather(*(asyncio.wrap_future(call.accepted) for call in calls))


def answer(sender, seq):
    sender.answered(sender.on_wire[seq], Envelope({}, None, 1, 0.0, 0.0, "w"))


async def test_requests_go_in_in_order_and_many_in_one_go():
    stream = Stream()
    sender = sender_to(stream)
    await accepted(*[send(sender, f"op{index}") for index in range(300)])
    assert stream.ops == [f"op{index}" for index in range(300)]
    assert len(stream.calls) < 10


async def test_a_large_payload_is_not_sent_with_many_others():
    stream = Stream()
    sender = sender_to(stream)
    call = PendingCall("job", lambda results: results, None)
    sender.enqueue([Request.of(call, "op", 0, bytes(5 << 20)) for _ in range(3)])
    await accepted(call)
    assert stream.calls == [1, 1, 1]


async def test_a_full_backlog_holds_the_submit_until_there_is_room():
    stream = Stream(backlog=2)
    sender = sender_to(stream)
    calls = [send(sender, f"op{index}") for index in range(6)]
    await accepted(*calls[:2])
    await wait_until_async(lambda: len(stream.calls) >= 3, "it tries again by itself")
    assert not calls[2].accepted.done()
    while stream.done_seq < 6:
        await wait_until_async(lambda: sender.last_seq == min(stream.done_seq + 2, 6), "the backlog is full again")
        stream.done_seq += 1
        answer(sender, stream.done_seq)
    await accepted(*calls)
    assert stream.ops == [f"op{index}" for index in range(6)]


async def test_a_full_backlog_does_not_see_every_payload_again_and_again():
    stream = Stream(backlog=1)
    sender = sender_to(stream)
    for index in range(50):
        send(sender, f"op{index}")
    await wait_until_async(lambda: len(stream.calls) >= 5, "it tries again")
    assert stream.calls[0] == 50
    assert set(stream.calls[1:]) == {1}


async def test_a_refused_request_burns_no_sequence_number():
    stream = Stream()
    sender = sender_to(stream)
    stream.replies = [None, trio.PayloadTooLarge("too large")]
    first, refused, third = send(sender, "first"), send(sender, "refused"), send(sender, "third")
    await accepted(first, third)
    with pytest.raises(trio.PayloadTooLarge):
        refused.outcome.result(timeout=0)
    assert stream.ops == ["first", "third"]
    assert third.seqs == [2]


async def test_a_split_call_refused_at_its_first_part_leaves_no_trace():
    stream = Stream()
    sender = sender_to(stream)
    stream.replies = [trio.ServerFull("out of memory")]
    refused, after = send(sender, "a", "b", "c"), send(sender, "after")
    await accepted(after)
    assert isinstance(refused.accepted.exception(), trio.ServerFull)
    assert stream.ops == ["after"]


async def test_a_split_call_that_has_begun_waits_for_memory():
    stream = Stream()
    sender = sender_to(stream)
    stream.replies = [None, trio.ServerFull("out of memory")]
    await accepted(send(sender, "a", "b", "c"))
    assert stream.ops == ["a", "b", "c"]


async def test_a_split_call_that_cannot_be_completed_stops_the_job():
    stream = Stream()
    sender = sender_to(stream)
    stream.replies = [None, trio.PayloadTooLarge("too large")]
    calls = [send(sender, "a", "b"), send(sender, "optim_step")]
    for call in calls:
        with pytest.raises(trio.PayloadTooLarge):
            await asyncio.wrap_future(call.accepted)
    assert stream.ops == ["a"]
    with pytest.raises(trio.PayloadTooLarge):
        await accepted(send(sender, "later"))


async def test_what_redis_forgot_is_sent_again():
    stream = Stream()
    sender = sender_to(stream)
    calls = [send(sender, f"op{index}") for index in range(5)]
    await accepted(*calls)
    answer(sender, 1)
    stream.roll_back(2)
    await accepted(send(sender, "next"))
    assert stream.ops == ["op0", "op1", "op2", "op3", "op4", "next"]


async def test_what_redis_forgot_is_sent_again_though_nothing_new_is_submitted():
    stream = Stream()
    sender = sender_to(stream)
    await accepted(*[send(sender, f"op{index}") for index in range(5)])
    answer(sender, 4)  # its result was seen, and yet the request is gone
    stream.roll_back(0)
    sender.rolled_back(Progress(0, 0, "start"))
    await wait_until_async(lambda: stream.ops == [f"op{index}" for index in range(5)], "all are sent again")
    assert [request.seq for request in sender.unanswered()] == [1, 2, 3, 4, 5]


async def test_a_roll_back_behind_what_is_remembered_is_an_error():
    stream = Stream()
    sender = sender_to(stream)
    await accepted(*[send(sender, f"op{index}") for index in range(5)])
    for seq in (1, 2, 3):
        answer(sender, seq)
    sender.forget(window_s=0)
    stream.roll_back(1)
    call = send(sender, "next")
    with pytest.raises(trio.HistoryDiverged, match="cannot repeat"):
        await accepted(call)
    with pytest.raises(trio.HistoryDiverged):
        await accepted(send(sender, "later"))


async def test_another_history_is_not_continued():
    stream = Stream()
    sender = sender_to(stream)
    await accepted(*[send(sender, f"op{index}") for index in range(3)])
    stream.roll_back(1)
    stream.chains[-1] = "somebody else's"
    with pytest.raises(trio.HistoryDiverged):
        await accepted(send(sender, "next"))


async def test_payloads_are_kept_until_answered_and_a_while_longer():
    stream = Stream()
    sender = sender_to(stream)
    await accepted(*[send(sender, f"op{index}") for index in range(3)])
    answer(sender, 2)
    sender.forget(window_s=0)
    assert list(sender.on_wire) == [1, 2, 3]  # in order: 1 has no answer yet
    answer(sender, 1)
    sender.forget(window_s=60)
    assert list(sender.on_wire) == [1, 2, 3]
    sender.forget(window_s=0)
    assert list(sender.on_wire) == [3]
    assert not sender.idle


async def test_what_was_not_sent_can_be_withdrawn_whole():
    stream = Stream(backlog=1)
    sender = sender_to(stream)
    first, split = send(sender, "first"), send(sender, "a", "b")
    await accepted(first)
    await wait_until_async(lambda: len(stream.calls) >= 2, "the backlog is full")
    await wait_until_async(lambda: len(sender.on_wire) == 1, "nothing is under way")
    sender.withdraw(split)
    with pytest.raises(trio.RequestCancelled):
        await accepted(split)
    stream.backlog = None
    await accepted(send(sender, "last"))
    assert stream.ops == ["first", "last"]


async def test_what_is_under_way_goes_in():
    stream = Stream()
    sender = sender_to(stream)
    stream.open.clear()
    call = send(sender, "a", "b")
    await wait_until_async(lambda: stream.calls, "it is under way")
    sender.withdraw(call)
    stream.open.set()
    await accepted(call)
    assert stream.ops == ["a", "b"]


async def test_stopping_fails_everything_unfinished():
    stream = Stream(backlog=1)
    sender = sender_to(stream)
    calls = [send(sender, "a"), send(sender, "b")]
    await accepted(calls[0])
    sender.stop(trio.ServiceClosed("closed"))
    calls.append(send(sender, "c"))
    for call in calls:
        with pytest.raises(trio.ServiceClosed):
            call.outcome.result(timeout=0)
    assert sender.idle


async def test_a_connection_that_is_gone_for_good_fails_the_job():
    stream = Stream()
    sender = sender_to(stream)

    async def gone(*_):
        raise trio.ServiceUnavailable("cannot reach Redis")

    stream.submit = gone
    with pytest.raises(trio.ServiceUnavailable):
        await accepted(send(sender, "a"))
    with pytest.raises(trio.ServiceUnavailable):
        await accepted(send(sender, "b"))


@pytest.mark.parametrize("seed", range(20))
async def test_each_request_goes_in_exactly_once_whatever_happens(seed):
    """Refusals, full backlogs, results and roll-backs at random: the stream holds what was not refused, in order."""
    chance = random.Random(seed)
    stream = Stream(backlog=8)
    sender = sender_to(stream)
    calls, refused = {}, set()
    truly = stream.submit_one

    def submit_one(request):
        next_one = request.seq == stream.last_seq + 1 and request.chain == stream.chains[-1]
        if next_one and not calls[request.op].accepted_parts and chance.random() < 0.05:
            refused.add(request.op)
            return trio.PayloadTooLarge("too large")
        return truly(request)

    stream.submit_one = submit_one
    for index in range(200):
        calls[f"op{index}"] = send(sender, f"op{index}")
        if chance.random() < 0.3:
            await asyncio.sleep(0)
        if chance.random() < 0.5 and stream.done_seq < sender.last_seq:
            stream.done_seq += 1
            answer(sender, stream.done_seq)
        if chance.random() < 0.02:
            stream.roll_back(max(stream.last_seq - chance.randrange(5), 0))
    while not all(call.accepted.done() for call in calls.values()):
        await asyncio.sleep(0.001)
        for seq in range(stream.done_seq + 1, min(stream.last_seq, sender.last_seq) + 1):
            stream.done_seq = seq
            if seq in sender.on_wire:
                answer(sender, seq)
    assert stream.ops == [op for op in calls if op not in refused]
