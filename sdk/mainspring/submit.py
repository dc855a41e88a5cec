"""One job's requests on their way into its stream: strictly in order, each exactly once, whatever happens on the way."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from mainspring.futures import PendingCall
from mainspring.transport import Outgoing, Progress, Transport
from mainspring_broker.errors import HistoryDiverged, InternalError, MainspringError, RequestCancelled, ServerFull
from mainspring_broker.functions import JobHead, chain_next, request_digest
from mainspring_broker.retry import Backoff
from mainspring_broker.wire import End, Envelope, encode_operation

log = logging.getLogger("mainspring")

MAX_REQUESTS = 128  # sent in one go
MAX_BYTES = 8 << 20


@dataclass(slots=True, eq=False)
class Request:
    """One request of a call."""

    call: PendingCall[Any]
    part: int  # its index in the call
    op: str
    tokens: int
    payload: bytes
    digest: str
    seq: int = 0  # given when it is sent
    chain: str = ""  # the sender's chain before it
    answered_at: float | None = None
    missed: bool = False  # it was executed, but there was no result when last looked

    @classmethod
    def of(cls, call: PendingCall[Any], op: str, tokens: int, payload: bytes) -> Request:
        """The next part of `call`."""
        return cls(call, call.add_part(op, tokens), op, tokens, payload, request_digest(op, payload))


class JobSender:
    """Keeps one job's requests in order, and their payloads until Redis can no longer forget them.

    All of it runs on the client's event loop.

    Attributes:
        last_seq: highest sequence number known to be accepted.
        on_wire: requests that have been sent, by seq; those up to `last_seq` were accepted.
        ending: the job's end has been asked for.
        never_opened: why the job takes no requests, if it could not be opened.
    """

    def __init__(self, connection: Transport, job: str, writer: str, head: JobHead) -> None:
        self.job = job
        self.writer = writer
        self.last_seq = head.last_seq
        self.on_wire: dict[int, Request] = {}
        self.ending = False
        self.never_opened: MainspringError | None = None
        self._chain = head.chain
        self._connection = connection
        self._waiting: deque[Request] = deque()  # not yet accepted; the first ones may be on the wire
        self._rollback: Progress | None = None
        self._broken: MainspringError | None = None
        self._room = asyncio.Event()  # a result came, so the backlog is shorter
        self._pump: asyncio.Task[None] | None = None

    # -- what a training client does ----------------------------------------------------------------------------------

    def enqueue(self, requests: list[Request]) -> None:
        """Send all parts of a call, after everything enqueued before."""
        if self._broken is not None:
            requests[0].call.fail(self._broken)
            return
        if self.never_opened is not None and requests[-1].op != "end":
            call = requests[0].call
            call.accepted.set_result(None)  # as if it had been sent a moment earlier: its future tells
            call.fail(copy.copy(self.never_opened))
            return
        self.ending = self.ending or requests[-1].op == "end"
        self._waiting.extend(requests)
        self._start()

    def farewell(self) -> Outgoing | None:
        """The job's end, behind everything accepted; None if it has been asked for, or something is still on its way."""
        if self.ending or self._waiting or self._broken is not None:
            return None
        payload = encode_operation(End())
        return Outgoing(self.last_seq + 1, self._chain, "end", 0, request_digest("end", payload), payload)

    def withdraw(self, call: PendingCall[Any]) -> None:
        """Take a call back if nothing of it has been sent; else it goes in as if nobody had asked."""
        if call.accepted_parts or any(request.call is call for request in self.on_wire.values()):
            return
        self._drop(call)
        call.fail(RequestCancelled(f"job {self.job}: the request was withdrawn before it was sent"))

    # -- what the collector of results does ---------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._waiting and not self.on_wire

    def unanswered(self, up_to: int | None = None) -> list[Request]:
        """Requests on the wire without a result, in order."""
        return [
            request
            for seq, request in self.on_wire.items()
            if request.answered_at is None and (up_to is None or seq <= up_to)
        ]

    def answered(self, request: Request, answer: Envelope | MainspringError) -> None:
        """The result of a request, or the reason why there will be none."""
        request.answered_at = time.monotonic()
        request.call.part_answered(request.part, answer)
        self._room.set()

    def forget(self, window_s: float) -> None:
        """Let go of payloads that were answered so long ago that Redis has them safely."""
        until = time.monotonic() - window_s
        for seq, request in list(self.on_wire.items()):
            if seq > self.last_seq or request.answered_at is None or request.answered_at > until:
                break
            del self.on_wire[seq]

    def rolled_back(self, progress: Progress) -> None:
        """The service has forgotten accepted requests (Redis restarted): send them again."""
        self._rollback = progress
        self._start()

    def stop(self, error: MainspringError) -> None:
        """Fail everything unfinished, and every later call."""
        self._broken = error
        if self._pump is not None:
            self._pump.cancel()
        calls = {request.call for request in (*self._waiting, *self.on_wire.values())}
        self._waiting.clear()
        self.on_wire.clear()
        for call in calls:
            call.fail(copy.copy(error))  # each its own traceback

    # -- the pump -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
            self._pump.add_done_callback(self._ended)

    def _ended(self, pump: asyncio.Task[None]) -> None:
        if not pump.cancelled() and (error := pump.exception()) is not None:
            if not isinstance(error, MainspringError):
                log.error("job %s: submitting failed", self.job, exc_info=error)
                error = InternalError(f"job {self.job}: submitting failed: {error!r}")
            self.stop(error)

    async def _run(self) -> None:
        window, backoff = MAX_REQUESTS, Backoff(first=0.02, limit=1.0)
        while self._waiting or self._rollback:
            if self._rollback is not None:
                self._rewind(self._rollback.last_seq, self._rollback.chain)
                self._rollback = None
                continue
            batch = self._next_batch(window)
            self._room.clear()
            heads = await self._connection.submit(
                self.job, self.writer, [Outgoing(r.seq, r.chain, r.op, r.tokens, r.digest, r.payload) for r in batch]
            )
            if self._broken is not None:
                return  # stopped meanwhile
            if self._settle(batch, heads) == "full":
                window = 1  # feel the way, a full backlog need not see every payload again and again
                with suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next()):
                        await self._room.wait()
            else:
                window = min(2 * window, MAX_REQUESTS)
                backoff.reset()

    def _next_batch(self, window: int) -> list[Request]:
        """The first waiting requests, each with its seq and chain as if those before it were accepted."""
        batch: list[Request] = []
        seq, chain, size = self.last_seq, self._chain, 0
        for request in islice(self._waiting, window):
            size += len(request.payload)
            if batch and size > MAX_BYTES:
                break
            seq += 1
            request.seq, request.chain, request.answered_at, request.missed = seq, chain, None, False
            chain = chain_next(chain, request.digest)
            self.on_wire[seq] = request
            batch.append(request)
        return batch

    def _settle(self, batch: list[Request], heads: list[JobHead | MainspringError]) -> Literal["on", "full"]:
        """Take note of the replies up to the first that is not an acceptance: nothing behind it was accepted either."""
        for index, (request, head) in enumerate(zip(batch, heads, strict=True)):
            if isinstance(head, JobHead) and head.status in ("accepted", "have"):
                self._accept(request)
                continue
            for unsent in batch[index:]:
                del self.on_wire[unsent.seq]
            if isinstance(head, JobHead):
                if head.status == "full":
                    return "full"
                self._rewind(head.last_seq, head.chain)
            elif isinstance(head, ServerFull) and request.call.accepted_parts:
                return "full"  # a call that has begun is not left half done
            else:
                self._refuse(request.call, head)
            break
        return "on"

    def _accept(self, request: Request) -> None:
        self._waiting.popleft()
        self.last_seq = request.seq
        self._chain = chain_next(request.chain, request.digest)
        request.call.part_accepted(request.part, request.seq)

    def _refuse(self, call: PendingCall[Any], error: MainspringError) -> None:
        """Nothing happened, and the next request takes the sequence number. Half a call would be a wrong update, though."""
        self._drop(call)
        call.fail(error)
        if call.accepted_parts:
            raise error

    def _drop(self, call: PendingCall[Any]) -> None:
        self._waiting = deque(request for request in self._waiting if request.call is not call)

    def _rewind(self, last_seq: int, chain: str) -> None:
        """Go back to where the service is, if that is a place where this client has been."""
        if last_seq >= self.last_seq:
            return
        again = [request for seq, request in self.on_wire.items() if last_seq < seq <= self.last_seq]
        if len(again) != self.last_seq - last_seq or again[0].chain != chain:
            raise HistoryDiverged(
                f"job {self.job}: the service has requests up to {last_seq}, this client sent {self.last_seq} and cannot "
                "repeat what is missing: Redis has lost more than a restart may take back"
            )
        log.warning("job %s: Redis forgot requests %d to %d, sending them again", self.job, last_seq + 1, self.last_seq)
        for request in again:
            del self.on_wire[request.seq]
        self._waiting.extendleft(reversed(again))
        self.last_seq, self._chain = last_seq, chain
