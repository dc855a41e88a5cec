"""A thread with an event loop, where everything that touches the network happens."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from mainspring_broker.errors import ServiceClosed

T = TypeVar("T")

CANCEL_TIMEOUT_S = 5.0


def closed_error() -> ServiceClosed:
    return ServiceClosed("this ServiceClient has been closed: make a new one")


class BackgroundLoop:
    """A daemon thread, started by its first use. Nothing that is posted is ever lost: it runs, or it is abandoned."""

    def __init__(self, shutdown: Callable[[], Awaitable[None]]) -> None:
        """`shutdown` runs on the loop when all of its tasks have been cancelled."""
        self._shutdown = shutdown
        self._lock = threading.RLock()  # reentrant: the garbage collector may call `close` anywhere
        self._inbox: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._stopping = False
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def post(self, action: Callable[[], None], abandon: Callable[[], None]) -> None:
        """Have the loop run `action`; actions keep their order. `abandon` is called instead if the loop ends before.

        Raises:
            ServiceClosed: the loop has ended.
        """
        with self._lock:
            if self._stopping:
                raise closed_error()
            self._inbox.append((action, abandon))
            if self._thread is None:
                self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
                self._thread = threading.Thread(target=self._main, name="mainspring-client", daemon=True)
                self._thread.start()
            elif len(self._inbox) == 1:
                self._loop.call_soon_threadsafe(self._drain)

    def start(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine on the loop. Cancelling the future cancels it; it ends with ServiceClosed if the loop does."""
        future: Future[T] = Future()
        task: asyncio.Task[T] | None = None

        def finished(done: asyncio.Task[T]) -> None:
            with suppress(InvalidStateError):  # cancelled by its caller
                if done.cancelled():
                    future.set_exception(closed_error())
                elif (error := done.exception()) is not None:
                    future.set_exception(error)
                else:
                    future.set_result(done.result())

        def begin() -> None:
            nonlocal task
            if not future.cancelled():
                task = self._loop.create_task(make())
                task.add_done_callback(finished)

        def cancel() -> None:
            if task is not None:
                task.cancel()

        def cancelled(done: Future[T]) -> None:
            if done.cancelled():
                with suppress(ServiceClosed):
                    self.post(cancel, lambda: None)

        future.add_done_callback(cancelled)

        def abandon() -> None:
            with suppress(InvalidStateError):
                future.set_exception(closed_error())

        self.post(begin, abandon)
        return future

    def check_may_block(self) -> None:
        """Raises RuntimeError on the loop's own thread, which would wait for itself for ever."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a done-callback must not block: use the async methods, or another thread")

    def stop(self) -> threading.Thread | None:
        """Have the loop end. May be called often, from any thread. Returns its thread, to be waited for."""
        with self._lock:
            first, self._stopping = not self._stopping, True
            if first and self._thread is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        return self._thread

    def close(self) -> None:
        """End the loop and its thread."""
        thread = self.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    async def close_async(self) -> None:
        """As `close`, without blocking the caller's event loop."""
        if self.stop() is not None:
            await asyncio.wrap_future(self._ended)
            self.close()  # what is left of the thread takes no time

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            with self._lock:
                self._stopping = True
            for _, abandon in self._inbox:
                abandon()
            self._inbox.clear()
            self._ended.set_result(None)

    async def _serve(self) -> None:
        self._drain()
        await self._stop.wait()
        await self._cancel_tasks()
        await self._shutdown()

    async def _cancel_tasks(self) -> None:
        """Again and again, since `asyncio.wait_for` of Python 3.11, which redis-py sends with, may swallow it."""
        deadline = self._loop.time() + CANCEL_TIMEOUT_S
        while (tasks := asyncio.all_tasks() - {asyncio.current_task()}) and self._loop.time() < deadline:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.02)

    def _drain(self) -> None:
        with self._lock:
            inbox, self._inbox = self._inbox, deque()
        for action, _ in inbox:
            action()
