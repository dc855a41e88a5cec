"""What a training client remembers of its requests: when each was submitted and answered, and in which cycle it ran."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mainspring_broker.errors import MainspringError
from mainspring_broker.wire import Envelope

MAX_REQUESTS = 4096  # kept of one job; no payload and no result is among what is kept


@dataclass(slots=True)
class RequestStory:
    """One request. Times are seconds of this client's monotonic clock; None: not yet."""

    op: str
    tokens: int
    submitted_at: float
    seq: int = 0
    accepted_at: float | None = None
    answered_at: float | None = None
    cycle: int | None = None  # None also when it never ran
    queued_ms: float = 0.0  # from acceptance to the start of its cycle, by the server's clock
    compute_ms: float = 0.0  # of its cycle on its worker
    error: str | None = None  # the code of what went wrong

    def accepted(self, seq: int) -> None:
        self.seq, self.accepted_at = seq, time.monotonic()

    def answered(self, answer: Envelope | MainspringError) -> None:
        self.answered_at = time.monotonic()
        if isinstance(answer, MainspringError):
            self.error = answer.code
        else:
            self.cycle, self.queued_ms, self.compute_ms = answer.cycle, answer.queued_ms, answer.compute_ms
            self.error = str(answer.error.get("code")) if answer.error else None

    def failed(self, error: MainspringError) -> None:
        """The request will have no answer."""
        if self.answered_at is None:
            self.answered_at, self.error = time.monotonic(), error.code


class Recorder:
    """The last requests of one job. May be used from any thread."""

    def __init__(self, limit: int = MAX_REQUESTS) -> None:
        self._stories: deque[RequestStory] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def add(self, stories: Iterable[RequestStory]) -> None:
        """Remember requests, which go on being filled in."""
        with self._lock:
            self._stories.extend(stories)

    def stories(self) -> list[RequestStory]:
        """A copy of what is known now."""
        with self._lock:
            return [replace(story) for story in self._stories]
