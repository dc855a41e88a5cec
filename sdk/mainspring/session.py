"""The engine room of a ServiceClient: one thread, one bounded connection pool, one subscription, however many jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from mainspring.background import BackgroundLoop, closed_error
from mainspring.futures import PendingCall
from mainspring.results import ResultCollector
from mainspring.settings import ClientSettings
from mainspring.submit import JobSender, Request
from mainspring.transport import ConnectionLost, Transport
from mainspring.types import ServerCapabilities
from mainspring_broker import wire
from mainspring_broker.errors import LibraryMissing, MainspringError, ServiceUnavailable
from mainspring_broker.retry import Backoff

log = logging.getLogger("mainspring")

T = TypeVar("T")

SILENT_S = 2.0  # of waiting for the service, before it is said
END_TIMEOUT_S = 2.0  # for ending the jobs of a client that is closed


class Session:
    """What a client and its training clients share. Its methods may be called from any thread, unless they are `async`."""

    def __init__(self, settings: ClientSettings) -> None:
        self.connection = _transport(settings)
        self._settings = settings
        self._collector = ResultCollector(self.connection)
        self._background = BackgroundLoop(self._shutdown)
        self._library_checked = False
        self._jobs: dict[str, JobSender] = {}  # those of this client that have not ended

    # -- from outside the loop ----------------------------------------------------------------------------------------

    def start(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine on the session's loop."""
        return self._background.start(make)

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """As `start`, and wait."""
        self.check_may_block()
        return self.start(make).result()

    def check_may_block(self) -> None:
        self._background.check_may_block()

    def post(self, sender: JobSender, requests: list[Request]) -> None:
        """Send the parts of a call, behind everything posted for this job before."""

        def enqueue() -> None:
            sender.enqueue(requests)
            self._collector.watch(sender)

        self._background.post(enqueue, lambda: requests[0].call.fail(closed_error()))

    def end_job(self, sender: JobSender, error: MainspringError) -> None:
        """End a job that could not be opened: it would only hold its place on the worker."""

        def end() -> None:
            sender.never_opened = error
            if not sender.ending:
                payload = wire.encode_operation(wire.End())
                call: PendingCall[None] = PendingCall(sender.job, lambda parts: None, None)
                sender.enqueue([Request.of(call, "end", 0, payload)])
                self._collector.watch(sender)

        self._background.post(end, lambda: None)

    def withdraw(self, sender: JobSender, call: PendingCall[Any]) -> None:
        """Take a call back if nothing of it has been sent yet."""
        self._background.post(lambda: sender.withdraw(call), lambda: None)

    def close(self) -> None:
        """End this client's jobs, the thread and all connections; what is unfinished fails with ServiceClosed.

        Requests that were accepted still run: a job's end queues up behind them.
        """
        self._background.close()

    async def close_async(self) -> None:
        """As `close`, without blocking the caller's event loop."""
        await self._background.close_async()

    async def _shutdown(self) -> None:
        await self._end_jobs()
        self._collector.stop(closed_error())
        await self.connection.aclose()

    async def _end_jobs(self) -> None:
        """A job whose client is gone would only hold its place on the worker. As far as the service can be reached now."""

        async def end(sender: JobSender) -> None:
            if (last := sender.farewell()) is not None:
                with suppress(MainspringError):
                    await self.connection.submit(sender.job, sender.writer, [last])

        ends = [asyncio.ensure_future(end(sender)) for sender in self._jobs.values() if not sender.ending]
        if ends:
            _, late = await asyncio.wait(ends, timeout=END_TIMEOUT_S)
            for task in late:
                task.cancel()

    # -- on the loop --------------------------------------------------------------------------------------------------

    async def capabilities(self) -> ServerCapabilities:
        """What the pool serves; waits for its first clock and worker.

        Raises:
            LibraryMissing, ServiceUnavailable: they did not come within the connect timeout.
            LibraryMismatch: the service is of another version.
        """
        return await self._until_connected(self._look)

    async def open_job(
        self, job: str, writer: str, base_model: str | None, rank: int, spec: Mapping[str, Any]
    ) -> tuple[JobSender, ServerCapabilities]:
        """Make a job's record; None is the pool's base model. Raises what `capabilities` and `functions.create_job` do."""
        found = await self.capabilities()
        model = base_model or found.base_model
        head = await self._until_connected(lambda: self.connection.create_job(job, writer, model, rank, spec))
        self._jobs = {name: sender for name, sender in self._jobs.items() if not sender.ending}
        sender = self._jobs[job] = JobSender(self.connection, job, writer, head)
        return sender, found

    async def cancel(self, sender: JobSender, seqs: list[int]) -> bool:
        """True: none of the requests had started. They are asked in order, since the first would be the first to start."""
        for seq in seqs:
            if not await self.connection.cancel(sender.job, sender.writer, seq):
                return False
        return bool(seqs)

    async def _look(self) -> ServerCapabilities:
        if not self._library_checked:
            await self.connection.check_library()
            self._library_checked = True
        info = await self.connection.info()
        if "base_model" not in info:
            raise ServiceUnavailable(
                f"no worker has registered in pool {self._settings.pool!r} yet; start one: mainspring worker"
            )
        limits = {
            name: int(info[name]) if info.get(name) else None
            for name in ("max_backlog", "max_backlog_bytes", "max_payload_bytes", "token_budget")
        }
        return ServerCapabilities(
            base_model=info["base_model"],
            base_model_path=info.get("base_model_path", info["base_model"]),
            vocab_size=int(info["vocab_size"]),
            max_length=int(info["max_length"]),
            **limits,
        )

    async def _until_connected(self, operation: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Repeat while something of the service is still missing, at most for the connect timeout."""
        begun = time.monotonic()
        deadline = begun + self._settings.connect_timeout_s
        backoff, told = Backoff(limit=0.5), False
        while True:
            try:
                return await operation()
            except (LibraryMissing, ServiceUnavailable) as error:
                if time.monotonic() > deadline:
                    raise self._explained(error) from error
                if not told and time.monotonic() - begun > SILENT_S:
                    told = True
                    log.warning("waiting up to %g s: %s", self._settings.connect_timeout_s, error)
            await asyncio.sleep(backoff.next())

    def _explained(self, error: MainspringError) -> MainspringError:
        waited = f"(waited {self._settings.connect_timeout_s:g} s)"
        if isinstance(error, ConnectionLost):
            return ServiceUnavailable(
                f"{error} {waited}; start the service (mainspring up), or say where it is: MAINSPRING_URL"
            )
        return type(error)(f"{error} {waited}", **error.details)


def _transport(settings: ClientSettings) -> Transport:
    """What the URL asks for. Only that is imported."""
    if settings.url.startswith("mock:"):
        from mainspring.mock import MockTransport

        return MockTransport(settings)
    from mainspring.connection import Connection

    return Connection(settings)
