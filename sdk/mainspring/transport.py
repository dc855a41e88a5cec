"""The seam between a client and whatever serves it: Redis (`connection.py`), or nothing at all (`mock.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mainspring.settings import ClientSettings
from mainspring_broker.errors import MainspringError, ServiceUnavailable
from mainspring_broker.functions import JobHead


class ConnectionLost(ServiceUnavailable):
    """The service did not answer; what was sent may or may not have arrived."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A job's head, as its hash tells."""

    last_seq: int  # highest accepted
    done_seq: int  # highest executed
    chain: str  # after last_seq


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request with its place in the job."""

    seq: int
    chain: str  # the sender's chain before it
    op: str
    tokens: int
    digest: str
    payload: bytes


class Transport(Protocol):
    """A tenant's way to its pool. Used on one event loop only, but for `expect`."""

    settings: ClientSettings
    where: str  # for people

    @property
    def lost_for_s(self) -> float:
        """Seconds since the service was last seen, 0 while it answers."""
        ...

    async def aclose(self) -> None: ...

    async def check_library(self) -> None:
        """Raises LibraryMissing, LibraryMismatch, ConnectionLost unless the service has this client's functions."""
        ...

    async def info(self) -> dict[str, str]:
        """Facts and limits of the pool; empty before its first clock and worker. Raises ConnectionLost."""
        ...

    async def create_job(self, job: str, writer: str, base_model: str, rank: int, spec: Mapping[str, Any]) -> JobHead:
        """Raises what `functions.create_job` does, and ConnectionLost; the same writer may repeat it."""
        ...

    async def submit(self, job: str, writer: str, requests: Sequence[Outgoing]) -> list[JobHead | MainspringError]:
        """Send requests in one go; the reply to each, or its error.

        Raises:
            ConnectionLost: the service was away for longer than the client's patience.
        """
        ...

    async def cancel(self, job: str, writer: str, seq: int) -> bool:
        """False: it is too late. Raises ConnectionLost."""
        ...

    async def progress(self, jobs: Sequence[str]) -> list[Progress | None]:
        """Head of each job, None for one that is not there. Raises ConnectionLost."""
        ...

    async def results(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """The packed envelopes of (job, seq). Raises ConnectionLost."""
        ...

    def announcements(self) -> AsyncIterator[tuple[str, int] | None]:
        """(job, seq) of each result of the tenant, as long as the subscription lives; None whenever it begins.

        Raises:
            ConnectionLost: the subscription is lost, and so may be announcements.
        """
        ...

    def expect(self, job: str, seq: int) -> None:
        """Somebody now waits for that result. From any thread."""
        ...
