"""The entry to the service."""

from __future__ import annotations

import asyncio
import secrets
import time
import weakref
from types import TracebackType
from typing import Any

from mainspring.session import Session
from mainspring.settings import ClientSettings
from mainspring.training import TrainingClient
from mainspring.types import ServerCapabilities
from mainspring_broker import keys, wire


class ServiceClient:
    """A tenant's connection to one pool.

    Nothing happens until the first call; then one background thread and a few connections serve all training clients
    made from this one. Close it, or use it in a `with` or `async with` statement; jobs live on until they are ended.

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
        job, writer, init = _new_job(job, rank, seed, train_mlp, train_attn, train_unembed)
        spec = _spec(init)
        sender, found = self._session.run(lambda: self._session.open_job(job, writer, base_model, rank, spec))
        client = TrainingClient(self, self._session, sender, found, rank=rank, seed=init.seed)
        client._submitted(client._open(init))
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
        job, writer, init = _new_job(job, rank, seed, train_mlp, train_attn, train_unembed)
        spec = _spec(init)
        sender, found = await asyncio.wrap_future(
            self._session.start(lambda: self._session.open_job(job, writer, base_model, rank, spec))
        )
        client = TrainingClient(self, self._session, sender, found, rank=rank, seed=init.seed)
        await client._submitted_async(client._open(init))
        return client

    def get_server_capabilities(self) -> ServerCapabilities:
        """What the pool serves, and its limits. Waits for a clock and a worker, and raises, as creating a client does."""
        return self._session.run(self._session.capabilities)

    async def get_server_capabilities_async(self) -> ServerCapabilities:
        """As `get_server_capabilities`, without blocking the event loop."""
        return await asyncio.wrap_future(self._session.start(self._session.capabilities))

    def close(self) -> None:
        """End the thread and the connections. Unfinished futures end with ServiceClosed; the jobs live on."""
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


def _new_job(
    job: str | None, rank: int, seed: int | None, train_mlp: bool, train_attn: bool, train_unembed: bool
) -> tuple[str, str, wire.Init]:
    """Id and writer of a job, and its first request."""
    if job is None:
        job = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"  # sorts by time
    init = wire.Init(
        rank=rank,
        seed=secrets.randbits(31) if seed is None else seed,
        train_mlp=train_mlp,
        train_attn=train_attn,
        train_unembed=train_unembed,
    )
    return keys.check_name("job", job), secrets.token_hex(16), init


def _spec(init: wire.Init) -> dict[str, Any]:
    """The job's record for people."""
    return {
        "rank": init.rank,
        "seed": init.seed,
        "train_mlp": init.train_mlp,
        "train_attn": init.train_attn,
        "train_unembed": init.train_unembed,
    }
