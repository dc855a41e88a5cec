"""The entry to the service."""

from __future__ import annotations

import asyncio
import secrets
import time
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any

from mainspring.session import Session
from mainspring.settings import ClientSettings
from mainspring.submit import JobSender
from mainspring.training import TrainingClient
from mainspring.types import ServerCapabilities
from mainspring_broker import keys, wire
from mainspring_broker.errors import InvalidHyperparameter, MainspringError


class ServiceClient:
    """A tenant's connection to one pool.

    Nothing happens until the first call; then one background thread and a few connections serve all training clients
    made from this one. Close it, or use it in a `with` or `async with` statement: that ends its jobs, and so
    does the end of the program.

    Args:
        url: Redis or Valkey of the service. Default: MAINSPRING_URL, else redis://127.0.0.1:6379/0.
        tenant: who owns the jobs. Default: MAINSPRING_TENANT, else "default".
        pool: which pool. Default: MAINSPRING_POOL, else "main".
        settings: any other field of `ClientSettings`, e.g. `connect_timeout_s=5`.

    Raises:
        ValueError: a setting is unusable.
    """

    def __init__(
        self, url: str | None = None, *, tenant: str | None = None, pool: str | None = None, **settings: Any
    ) -> None:
        given = {"url": url, "tenant": tenant, "pool": pool, **settings}
        if unknown := sorted(given.keys() - ClientSettings.model_fields.keys()):
            raise TypeError(f"ServiceClient has no setting {', '.join(unknown)}")
        self._settings = ClientSettings(**{name: value for name, value in given.items() if value is not None})
        self._session = Session(self._settings)
        weakref.finalize(self, self._session.close)  # also at the interpreter's exit

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        job: str | None = None,
    ) -> TrainingClient:
        """Start a job: one fresh LoRA adapter with its optimizer.

        Returns as soon as the job is in the service's hands. Should a worker be unable to open it, then the job's
        futures say why.

        Args:
            base_model: the model that the pool serves, by its name or its path.
            rank: of the adapter's matrices.
            seed: of their initial values; random, and recorded with the job, if None.
            train_mlp: adapt the MLP layers.
            train_attn: adapt the attention layers.
            train_unembed: adapt the output layer.
            job: the job's id; made up from the time if None.

        Raises:
            UnknownTenant, UnknownBaseModel, JobExists: what the names say.
            ServiceUnavailable, LibraryMissing: Redis, clock or worker did not come within the connect timeout.
            LibraryMismatch: client and service are of different versions.
        """
        opening = _init(rank, seed, train_mlp, train_attn, train_unembed)
        sender, found = self._session.run(self._new_job(job, base_model, opening))
        client = TrainingClient(self, self._session, sender, found, opening)
        client._submitted(client._open())
        return client

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        job: str | None = None,
    ) -> TrainingClient:
        """As `create_lora_training_client`, without blocking the event loop."""
        opening = _init(rank, seed, train_mlp, train_attn, train_unembed)
        sender, found = await asyncio.wrap_future(self._session.start(self._new_job(job, base_model, opening)))
        client = TrainingClient(self, self._session, sender, found, opening)
        await client._submitted_async(client._open())
        return client

    def create_training_client_from_state(self, path: str, job: str | None = None) -> TrainingClient:
        """Start a job with the weights of a checkpoint of this tenant, and a new optimizer.

        Waits until it is loaded: rank and layers are those of the checkpoint.

        Args:
            path: as a save has returned it.
            job: the job's id; made up from the time if None.

        Raises:
            CheckpointNotFound, CheckpointExpired, CheckpointMismatch, StorageFailed, PayloadInvalid: it cannot be loaded.
            SubmitError, ServiceError: as `create_lora_training_client`.
        """
        return self._from_state(wire.LoadState(path), job)

    async def create_training_client_from_state_async(self, path: str, job: str | None = None) -> TrainingClient:
        """As `create_training_client_from_state`, without blocking the event loop."""
        return await self._from_state_async(wire.LoadState(path), job)

    def create_training_client_from_state_with_optimizer(self, path: str, job: str | None = None) -> TrainingClient:
        """As `create_training_client_from_state`, with the optimizer as it was saved.

        Raises:
            NoOptimizerState: the checkpoint holds weights only.
        """
        return self._from_state(wire.LoadState(path, optimizer=True), job)

    async def create_training_client_from_state_with_optimizer_async(
        self, path: str, job: str | None = None
    ) -> TrainingClient:
        """As `create_training_client_from_state_with_optimizer`, without blocking the event loop."""
        return await self._from_state_async(wire.LoadState(path, optimizer=True), job)

    def get_server_capabilities(self) -> ServerCapabilities:
        """What the pool serves, and its limits. Waits for a clock and a worker, and raises, as creating a client does."""
        return self._session.run(self._session.capabilities)

    async def get_server_capabilities_async(self) -> ServerCapabilities:
        """As `get_server_capabilities`, without blocking the event loop."""
        return await asyncio.wrap_future(self._session.start(self._session.capabilities))

    def close(self) -> None:
        """End the jobs made with this client, then the thread and the connections.

        Requests that were accepted still run; futures that are unfinished end with ServiceClosed.
        """
        self._session.close()

    async def close_async(self) -> None:
        """As `close`, without blocking the event loop."""
        await self._session.close_async()

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> ServiceClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close_async()

    def __repr__(self) -> str:
        where = self._session.connection.where
        return f"ServiceClient({where!r}, tenant={self._settings.tenant!r}, pool={self._settings.pool!r})"

    # -- new jobs -----------------------------------------------------------------------------------------------------

    def _new_job(
        self, job: str | None, base_model: str | None, opening: wire.Init | wire.LoadState
    ) -> Callable[[], Coroutine[Any, Any, tuple[JobSender, ServerCapabilities]]]:
        """What makes a job's record, to be run on the session's loop. Of one from a checkpoint the rank is not known: 0."""
        if job is None:
            job = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"  # sorts by time
        name, writer = keys.check_name("job", job), secrets.token_hex(16)
        rank = opening.rank if isinstance(opening, wire.Init) else 0
        spec = {name: value for name, value in asdict(opening).items() if name != "alpha"}
        return lambda: self._session.open_job(name, writer, base_model, rank, spec)

    def _from_state(self, opening: wire.LoadState, job: str | None) -> TrainingClient:
        sender, found = self._session.run(self._new_job(job, None, opening))
        client = TrainingClient(self, self._session, sender, found, opening)
        try:
            client._describe(client._submitted(client._open()).result())
        except BaseException:
            with suppress(MainspringError):  # the first error is the one to see
                client.close()
            raise
        return client

    async def _from_state_async(self, opening: wire.LoadState, job: str | None) -> TrainingClient:
        sender, found = await asyncio.wrap_future(self._session.start(self._new_job(job, None, opening)))
        client = TrainingClient(self, self._session, sender, found, opening)
        try:
            loaded = await client._submitted_async(client._open())
            client._describe(await loaded)
        except BaseException:
            with suppress(MainspringError):
                await client.close_async()
            raise
        return client


def _init(rank: int, seed: int | None, train_mlp: bool, train_attn: bool, train_unembed: bool) -> wire.Init:
    """The first request of a job with a fresh adapter.

    Raises:
        InvalidHyperparameter: a rank that is no whole number from 1 on. (How much a model allows, the worker says.)
    """
    if type(rank) is not int or rank < 1:
        raise InvalidHyperparameter(f"rank is {rank!r:.100}; it must be a whole number, 1 or more", field="rank")
    return wire.Init(
        rank=rank,
        seed=secrets.randbits(31) if seed is None else seed,
        train_mlp=train_mlp,
        train_attn=train_attn,
        train_unembed=train_unembed,
    )
