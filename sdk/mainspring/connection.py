"""The one file that talks to Redis: a bounded pool of connections, patience with outages, typed replies."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    MasterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from mainspring.settings import ClientSettings
from mainspring.transport import ConnectionLost, Outgoing, Progress
from mainspring_broker import functions, keys, library
from mainspring_broker.errors import MainspringError, ServiceError
from mainspring_broker.functions import Call, JobHead
from mainspring_broker.retry import Backoff

T = TypeVar("T")
log = logging.getLogger("mainspring")

FAILOVER = (ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError)
SOCKET_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
QUIET_S = 15.0  # a subscription that says nothing for so long is asked whether it lives
CLOSE_TIMEOUT_S = 5.0
TELL_AFTER_S = 2.0


class Connection:
    """A tenant's connection to its pool. Used on one event loop only."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.pool = keys.check_name("pool", settings.pool)
        self.tenant = keys.check_name("tenant", settings.tenant)
        self.where = _without_password(settings.url)
        self._lost_since: float | None = None
        self._told = False
        self._client = redis.asyncio.Redis.from_pool(
            redis.asyncio.BlockingConnectionPool.from_url(
                settings.url,
                max_connections=settings.max_connections,
                timeout=None,
                socket_timeout=SOCKET_TIMEOUT_S,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),  # repeating is decided here, where it is known what may be repeated
            )
        )

    @property
    def lost_for_s(self) -> float:
        """Seconds since Redis was last seen, 0 while it answers."""
        return 0.0 if self._lost_since is None else time.monotonic() - self._lost_since

    async def aclose(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._client.aclose()
        except (RedisError, OSError, TimeoutError) as error:
            log.debug("closing the connection to %s: %r", self.where, error)

    # -- the pool -----------------------------------------------------------------------------------------------------

    async def check_library(self) -> None:
        """Raises LibraryMissing, LibraryMismatch, ConnectionLost unless the server has this client's functions."""
        call = Call("ms_version", (keys.info(self.pool),), (), lambda reply: bytes(reply).decode())
        library.check_version(await self._once(lambda: functions.run_async(self._client, call)))

    async def info(self) -> dict[str, str]:
        """Facts and limits of the pool; empty before its first clock and worker. Raises ConnectionLost."""
        fields: dict[bytes, bytes] = await self._once(lambda: self._client.hgetall(keys.info(self.pool)))  # type: ignore[arg-type,return-value]
        return {name.decode(): value.decode() for name, value in fields.items()}

    # -- a job --------------------------------------------------------------------------------------------------------

    async def create_job(self, job: str, writer: str, base_model: str, rank: int, spec: Mapping[str, Any]) -> JobHead:
        """Raises what `functions.create_job` does, and ConnectionLost; the same writer may repeat it."""
        call = functions.create_job(
            pool=self.pool, tenant=self.tenant, job=job, writer=writer, base_model=base_model, rank=rank, spec=spec
        )
        return await self._once(lambda: functions.run_async(self._client, call))

    async def submit(self, job: str, writer: str, requests: Sequence[Outgoing]) -> list[JobHead | MainspringError]:
        """Send requests in one go; the reply to each, or its error. After a lost connection all are repeated.

        Raises:
            ConnectionLost: Redis was away for longer than the client's patience.
        """
        calls = [
            functions.submit(
                pool=self.pool,
                tenant=self.tenant,
                job=job,
                writer=writer,
                seq=request.seq,
                chain=request.chain,
                op=request.op,
                tokens=request.tokens,
                digest=request.digest,
                payload=request.payload,
            )
            for request in requests
        ]

        async def send() -> list[JobHead | MainspringError]:
            async with self._client.pipeline(transaction=False) as pipeline:
                for call in calls:
                    pipeline.fcall(call.name, len(call.keys), *call.keys, *call.args)
                replies = await pipeline.execute(raise_on_error=False)
            return [_head(call, reply) for call, reply in zip(calls, replies, strict=True)]

        return await self._patiently(send)

    async def cancel(self, job: str, writer: str, seq: int) -> bool:
        """False: it is too late. Raises ConnectionLost."""
        call = functions.cancel(pool=self.pool, tenant=self.tenant, job=job, writer=writer, seq=seq)
        return await self._patiently(lambda: functions.run_async(self._client, call))

    async def progress(self, jobs: Sequence[str]) -> list[Progress | None]:
        """Head of each job, None for one that is not there. Raises ConnectionLost."""

        async def look() -> list[Any]:
            async with self._client.pipeline(transaction=False) as pipeline:
                for job in jobs:
                    pipeline.hmget(keys.job(self.pool, self.tenant, job), "last_seq", "done_seq", "chain")
                return await pipeline.execute()

        rows = await self._once(look)
        return [None if row[0] is None else Progress(int(row[0]), int(row[1]), row[2].decode()) for row in rows]

    async def results(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """What the result keys of (job, seq) hold. Raises ConnectionLost."""
        names = [keys.result(self.pool, self.tenant, job, seq) for job, seq in wanted]
        found: list[bytes | None] = await self._once(lambda: self._client.mget(names))  # type: ignore[arg-type,return-value]
        return found

    async def announcements(self) -> AsyncIterator[tuple[str, int] | None]:
        """(job, seq) of each result of the tenant, as long as the subscription lives; None whenever it begins.

        Raises:
            ConnectionLost: the subscription is lost, and so may be announcements.
        """
        async with self._errors(), self._client.pubsub() as pubsub:
            await pubsub.subscribe(keys.results_channel(self.pool, self.tenant))
            asked = False
            while True:
                message = await pubsub.get_message(timeout=QUIET_S)
                if message is not None:
                    asked = False
                    if message["type"] == "subscribe":
                        self._seen()
                        yield None
                    elif message["type"] == "message":
                        job, _, seq = message["data"].decode().rpartition(":")
                        if seq.isdecimal():
                            yield job, int(seq)
                elif asked:
                    raise RedisConnectionError("the subscription does not answer")
                else:
                    await pubsub.ping()
                    asked = True

    def expect(self, job: str, seq: int) -> None:
        """Nothing to do: the clock does not wait to be asked."""

    # -- outages ------------------------------------------------------------------------------------------------------

    async def _patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Repeat an operation that may be repeated while Redis is away, at most for `retry_timeout_s`."""
        backoff, first = Backoff(limit=5.0), True
        while True:
            try:
                return await self._once(operation)
            except ConnectionLost:
                if self.lost_for_s > self.settings.retry_timeout_s:
                    raise
            # Often only an idle connection was cut: the first repetition comes at once.
            await asyncio.sleep(0 if first else backoff.next())
            first = False

    async def _once(self, operation: Callable[[], Awaitable[T]]) -> T:
        async with self._errors():
            value = await operation()
        self._seen()
        return value

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Turns errors of Redis into ours."""
        try:
            yield
        except (RedisConnectionError, RedisTimeoutError, *FAILOVER, OSError) as error:
            refusal = error if isinstance(error, AuthenticationError) else error.__cause__
            if isinstance(refusal, AuthenticationError | ResponseError) and not isinstance(refusal, FAILOVER):
                raise ServiceError(f"Redis at {self.where} refused the login: {refusal}") from error
            self._lost(error)
            raise ConnectionLost(f"cannot reach Redis at {self.where}: {error}") from error
        except ResponseError as error:
            raise _refusal(error) from error

    def _lost(self, error: Exception) -> None:
        if self._lost_since is None:
            self._lost_since = time.monotonic()
        elif self.lost_for_s > TELL_AFTER_S and not self._told:  # once an outage, and not for every cut connection
            log.warning("no answer from Redis at %s for %.0f s (%s), trying on", self.where, self.lost_for_s, error)
            self._told = True

    def _seen(self) -> None:
        if self._told:
            log.warning("Redis at %s answers again after %.0f s", self.where, self.lost_for_s)
        self._lost_since, self._told = None, False


def _refusal(error: ResponseError) -> MainspringError:
    ours = functions.translate(error)
    return ours if isinstance(ours, MainspringError) else ServiceError(f"Redis refused the request: {error}")


def _head(call: Call[JobHead], reply: Any) -> JobHead | MainspringError:
    if isinstance(reply, FAILOVER):  # the whole pipeline is repeated
        raise reply
    if isinstance(reply, ResponseError):
        return _refusal(reply)
    try:
        return call.decode(reply)
    except MainspringError as error:
        return error


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//", url)
