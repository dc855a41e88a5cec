"""The future of a request: awaited from any event loop, read from any thread, as often as one likes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from mainspring.recorder import RequestStory
from mainspring_broker.errors import InternalError, MainspringError, StateLost, from_wire
from mainspring_broker.wire import Envelope

T = TypeVar("T")
U = TypeVar("U")


def _new_future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from now on a cancelled await cannot cancel it for everybody else
    return future


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a request went, in milliseconds."""

    queued_ms: float  # from acceptance of its first part to the start of that part's cycle, by the server's clock
    compute_ms: float  # in workers, summed over its cycles
    total_ms: float  # from the submit to the result, by this client's clock


class PendingCall(Generic[T]):
    """One call of a user: a request, or several parts of one. Everything but the two futures belongs to the loop's thread.

    Attributes:
        accepted: set when all parts are durably in the job's stream.
        outcome: set when all parts are executed.
        seqs: sequence number of each part, 0 while it has none.
        stories: what is told of each part in a cycle report.
    """

    def __init__(self, job: str, join: Callable[[list[dict[str, Any]]], T], init: PendingCall[Any] | None) -> None:
        """`join` makes the result of the parts' results. `init` is the call that opened the job, None if this is it."""
        self.job = job
        self.accepted: Future[None] = _new_future()
        self.outcome: Future[T] = _new_future()
        self.seqs: list[int] = []
        self.stories: list[RequestStory] = []
        self.accepted_parts = 0
        self.cycles: tuple[int, int] | None = None
        self.timings: Timings | None = None
        self._join = join
        self._init = init
        self._submitted = time.monotonic()
        self._answers: list[Envelope | MainspringError | None] = []
        self._missing = 0  # answers

    def add_part(self, op: str, tokens: int) -> int:
        """Announce one more part; the index it has."""
        self.seqs.append(0)
        self.stories.append(RequestStory(op, tokens, self._submitted))
        self._answers.append(None)
        self._missing += 1
        return len(self.seqs) - 1

    def part_accepted(self, part: int, seq: int) -> None:
        if self.seqs[part] == 0:
            self.seqs[part] = seq
            self.stories[part].accepted(seq)
            self.accepted_parts += 1
            if self.accepted_parts == len(self.seqs):
                with suppress(InvalidStateError):
                    self.accepted.set_result(None)

    def part_answered(self, part: int, answer: Envelope | MainspringError) -> None:
        """The result of one part; when it is the last, the call has its outcome. A repetition changes nothing."""
        if self._missing == 0 or self._answers[part] is not None:
            return
        self._answers[part] = answer
        self.stories[part].answered(answer)
        self._missing -= 1
        if self._missing == 0:
            answers, self._answers = self._answers, []
            self._finish([answer for answer in answers if answer is not None])

    def _finish(self, answers: list[Envelope | MainspringError]) -> None:
        envelopes = [answer for answer in answers if isinstance(answer, Envelope)]
        if envelopes:
            self._remember(envelopes)
        for answer in answers:
            if isinstance(answer, MainspringError):
                return self.fail(answer)
            if answer.error is not None:
                return self._fail_because_of_init(from_wire(answer.error))
        try:
            result = self._join([envelope.result or {} for envelope in envelopes])
        except (KeyError, TypeError, ValueError) as error:
            return self.fail(InternalError(f"job {self.job}: the worker's result cannot be read: {error!r}"))
        with suppress(InvalidStateError):
            self.outcome.set_result(result)

    def fail(self, error: MainspringError) -> None:
        """End the call: it was not accepted, or its result will never come."""
        for story in self.stories:
            story.failed(error)
        for future in (self.accepted, self.outcome):
            with suppress(InvalidStateError):
                future.set_exception(error)

    def _remember(self, envelopes: list[Envelope]) -> None:
        cycles = {envelope.cycle: envelope.compute_ms for envelope in envelopes}
        self.cycles = (min(cycles), max(cycles))
        self.timings = Timings(
            queued_ms=envelopes[0].queued_ms,
            compute_ms=sum(cycles.values()),
            total_ms=(time.monotonic() - self._submitted) * 1000,
        )

    def _fail_because_of_init(self, error: MainspringError) -> None:
        if not isinstance(error, StateLost) or self._init is None:
            return self.fail(error)
        # A job that never opened has no state to lose: then the reason is what its init said, which may come later.
        self._init.outcome.add_done_callback(lambda opened: self.fail(because_never_opened(error, opened.exception())))


def because_never_opened(error: MainspringError, cause: BaseException | None) -> MainspringError:
    if cause is None:
        return error
    explained = StateLost(f"the job was never opened, so it takes no requests: {cause}", **error.details)
    explained.__cause__ = cause
    return explained


class Waiters:
    """The event loops that wait for one outcome. It does not know its APIFuture, which so can go when nobody holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self) -> asyncio.Future[None]:
        """A future of the running loop that `wake` sets."""
        waiter = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.add(waiter)
        return waiter

    def discard(self, waiter: asyncio.Future[None]) -> None:
        with self._lock:
            self._waiting.discard(waiter)

    def wake(self, _: Future[Any]) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for waiter in waiting:
            with suppress(RuntimeError):  # its event loop was closed meanwhile
                waiter.get_loop().call_soon_threadsafe(_set, waiter)


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Host(Protocol):
    """What a future needs of the client that it came from."""

    def check_may_block(self) -> None: ...

    def expect(self, call: PendingCall[Any]) -> None: ...

    def start_cancel(self, call: PendingCall[Any]) -> Future[bool]: ...


class APIFuture(Generic[T]):
    """What a submit returns: the request is in the service's hands, its result will come.

    `await future` gives the result on any event loop, `future.result(timeout)` on any thread; both raise the request's
    error. A future that nobody looks at costs nothing and never complains.
    """

    def __init__(self, host: Host, call: PendingCall[Any], outcome: Future[T]) -> None:
        self._host = host
        self._call = call
        self._outcome = outcome
        self._waiters = Waiters()
        outcome.add_done_callback(self._waiters.wake)

    # -- the result ---------------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> T:
        """Block until the result is there.

        Raises:
            TimeoutError: not within `timeout` seconds; the request goes on, ask again.
            RequestError: the request failed.
            ServiceError: the client was closed, or the service could not be reached for a long time.
        """
        self._about_to_block()
        return self._outcome.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `result`, but the request's error is returned; None if it succeeded."""
        self._about_to_block()
        return self._outcome.exception(timeout)

    def done(self) -> bool:
        return self._outcome.done()

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    async def result_async(self, timeout: float | None = None) -> T:
        """As `result`, without blocking the event loop. Cancelling the await leaves the request alone."""
        waiter = self._waiters.add()
        try:
            if not self._outcome.done():
                self._host.expect(self._call)
                async with asyncio.timeout(timeout):
                    await waiter
        finally:
            self._waiters.discard(waiter)
        return self._outcome.result(0)

    def _about_to_block(self) -> None:
        if not self._outcome.done():
            self._host.check_may_block()
            self._host.expect(self._call)

    # -- what one can do with it --------------------------------------------------------------------------------------

    def add_done_callback(self, function: Callable[[APIFuture[T]], Any]) -> None:
        """Call `function(self)` when the result is there: at once if it is, else on the client's thread (do not block it)."""
        self._outcome.add_done_callback(lambda _: function(self))

    def map(self, function: Callable[[T], U]) -> APIFuture[U]:
        """A future of `function(result)`, with this one's error and story; what `function` raises becomes its error."""
        outcome: Future[U] = _new_future()

        def apply(done: Future[T]) -> None:
            if (error := done.exception()) is not None:
                outcome.set_exception(error)
                return
            try:
                outcome.set_result(function(done.result()))
            except Exception as raised:
                outcome.set_exception(raised)

        self._outcome.add_done_callback(apply)
        return APIFuture(self._host, self._call, outcome)

    def cancel(self) -> bool:
        """Ask the service to skip the request. Blocks for one round trip.

        Returns:
            True: it had not started, its result is RequestCancelled. False: it is too late, the result will come. (Of a
            request in several parts, those that had not started may be skipped even so; then it fails.)
        """
        self._host.check_may_block()
        return self._host.start_cancel(self._call).result()

    async def cancel_async(self) -> bool:
        """As `cancel`, without blocking the event loop."""
        return await asyncio.wrap_future(self._host.start_cancel(self._call))

    # -- its story ----------------------------------------------------------------------------------------------------

    @property
    def cycle(self) -> int | None:
        """The clock cycle it ran in (the last one, if it had several parts); None before it is done."""
        return self._call.cycles[1] if self._call.cycles else None

    @property
    def cycles(self) -> tuple[int, int] | None:
        """First and last cycle; None before it is done."""
        return self._call.cycles

    @property
    def timings(self) -> Timings | None:
        """Where the time went; None before it is done."""
        return self._call.timings

    @property
    def seqs(self) -> tuple[int, ...]:
        """Sequence numbers of its requests in the job."""
        return tuple(self._call.seqs)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """`<job>:<seq>` of its requests, as in the service's logs."""
        return tuple(f"{self._call.job}:{seq}" for seq in self._call.seqs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"an APIFuture has no {name!r}; its result may: call .result(), or await it")

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._outcome.exception() else "done"
        where = f" in cycle {self.cycle}" if self.cycle is not None else ""
        return f"<APIFuture {', '.join(self.request_ids)}: {state}{where}>"
