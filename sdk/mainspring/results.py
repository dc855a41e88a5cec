"""How results come back: one subscription a client, batched reads, and a slow poll for what was not announced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any

from mainspring.submit import JobSender, Request
from mainspring.transport import ConnectionLost, Progress, Transport
from mainspring_broker.errors import (
    InternalError,
    MainspringError,
    PayloadInvalid,
    ResultExpired,
    UnknownJob,
)
from mainspring_broker.retry import Backoff, jitter
from mainspring_broker.wire import decode_envelope

log = logging.getLogger("mainspring")

MAX_RESULTS = 64  # read at once
MAX_JOBS = 128  # looked at at once


class ResultCollector:
    """Brings each request's result to its sender. All of it runs on the client's event loop.

    An announcement may be lost, so it only says where to look now. The poll finds everything else: results without
    announcement, results that have expired, jobs that are gone, requests that a restart of Redis took back.
    """

    def __init__(self, connection: Transport) -> None:
        self._connection = connection
        self._settings = connection.settings
        self._senders: dict[str, JobSender] = {}  # by job: those with anything unfinished
        self._announced: dict[tuple[str, int], None] = {}  # in order, without repetition
        self._something_announced = asyncio.Event()
        self._look_now = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self, sender: JobSender) -> None:
        """Collect the results of this sender's requests until it has none open."""
        self._senders[sender.job] = sender
        if not self._tasks:
            self._tasks = [self._spawn(loop) for loop in (self._listen(), self._read(), self._poll())]

    def stop(self, error: MainspringError) -> None:
        """Fail everything unfinished."""
        for sender in self._senders.values():
            sender.stop(error)
        self._senders.clear()

    def _spawn(self, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(loop)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, MainspringError):
                log.error("collecting results failed", exc_info=error)
                error = InternalError(f"collecting results failed: {error!r}")
            for other in self._tasks:
                other.cancel()
            self._tasks = []  # the next call begins anew
            self.stop(error)

    # -- announcements ------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        backoff = Backoff()
        while True:
            with suppress(ConnectionLost):
                async for announced in self._connection.announcements():
                    if announced is None:  # subscribed: what was published before is there already
                        backoff.reset()
                        self._look_now.set()
                    elif announced[0] in self._senders:
                        self._announced[announced] = None
                        self._something_announced.set()
            await asyncio.sleep(backoff.next())

    async def _read(self) -> None:
        while True:
            await self._something_announced.wait()
            self._something_announced.clear()
            while self._announced:
                wanted = list(islice(self._announced, MAX_RESULTS))
                for place in wanted:
                    del self._announced[place]
                requests = []
                for job, seq in wanted:
                    sender = self._senders.get(job)
                    request = sender.on_wire.get(seq) if sender else None
                    if sender is not None and request is not None and request.answered_at is None:
                        requests.append((sender, request))
                try:
                    await self._deliver(requests)
                except ConnectionLost:
                    self._announced.clear()  # the poll will find them
                    self._look_now.set()

    async def _deliver(self, requests: list[tuple[JobSender, Request]]) -> list[tuple[JobSender, Request]]:
        """Read results and hand them over. Returns the requests that have none."""
        missing = []
        for chunk in _chunks(requests, MAX_RESULTS):
            found = await self._connection.results([(sender.job, request.seq) for sender, request in chunk])
            for (sender, request), data in zip(chunk, found, strict=True):
                if sender.on_wire.get(request.seq) is not request:
                    continue  # sent again meanwhile
                if data is None:
                    missing.append((sender, request))
                    continue
                try:
                    sender.answered(request, decode_envelope(data))
                except PayloadInvalid as error:
                    sender.answered(request, error)
        return missing

    # -- the poll -----------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            interval = self._settings.poll_interval_s * jitter.uniform(0.9, 1.1)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._look_now.wait()
            self._look_now.clear()
            try:
                await self._look()
            except ConnectionLost as error:
                if self._connection.lost_for_s > self._settings.retry_timeout_s:
                    self.stop(error)

    async def _look(self) -> None:
        for sender in list(self._senders.values()):
            sender.forget(self._settings.rollback_window_s)
            if sender.idle:
                del self._senders[sender.job]
        for chunk in _chunks(list(self._senders.values()), MAX_JOBS):
            accepted = [sender.last_seq for sender in chunk]
            heads = await self._connection.progress([sender.job for sender in chunk])
            for sender, last_seq, head in zip(chunk, accepted, heads, strict=True):
                await self._check(sender, last_seq, head)

    async def _check(self, sender: JobSender, last_seq: int, head: Progress | None) -> None:
        if head is not None and head.last_seq < last_seq:
            sender.rolled_back(head)
        due = sender.unanswered(up_to=head.done_seq if head else last_seq)
        for _, request in await self._deliver([(sender, request) for request in due]):
            # Only when it is missing twice: Redis may have been restarted between the look at the head and this one.
            if request.missed and request.answered_at is None:
                sender.answered(request, _lost(sender.job, request, head))
            request.missed = True


def _lost(job: str, request: Request, head: Progress | None) -> MainspringError:
    if head is None:
        return UnknownJob(f"job {job} is gone: it ended long ago, or Redis lost its data")
    return ResultExpired(
        f"job {job}, request {request.seq} ({request.op}): it was executed, but its result is no longer kept; read "
        "results earlier, or have workers keep them longer",
        seq=request.seq,
    )


def _chunks(items: list[Any], size: int) -> Iterable[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
