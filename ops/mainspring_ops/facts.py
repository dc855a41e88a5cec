"""What `mainspring doctor` looks at, read once: the server, the pool, this host, the storage and the base model.

Thin on purpose: nothing is judged here (that is checks.py), and nothing raises for what is wrong with the service.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mainspring_ops.terminal import CommandFailed, connect

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True, slots=True)
class Server:
    """The Redis or Valkey."""

    name: str = "Valkey 9.1.0"
    unsupported: str = ""  # why it is too old; "" when it is not
    policy: str = "noeviction"
    maxmemory: int = 2 * 2**30  # bytes; 0: no limit
    used_memory: int = 2**20  # bytes
    aof: bool = True
    appendfsync: str = "everysec"  # "": not told
    aof_error: bool = False  # its last write to the append-only file failed
    clients: int = 10
    max_clients: int = 10000
    skew_s: float = 0.0  # this host's clock minus the server's


@dataclass(frozen=True, slots=True)
class Worker:
    """One registered worker."""

    name: str
    host: str = ""
    state: str = "ready"
    silent_ms: int = 0  # since its last heartbeat
    jobs: int = 0
    slots: int = 64
    base_model: str = ""
    storage: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """What came of writing, reading and deleting in a storage."""

    storage: str
    result: Literal["ok", "elsewhere", "failed"]  # elsewhere: it is not reachable from this host
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """The base model's files."""

    name: str
    path: str = ""
    here: bool | None = True  # None: cannot be told
    expected: bool = True  # a worker of this host, or the first one, would need it here
    missing: tuple[str, ...] = ()
    load: Literal["", "ok", "failed"] = ""  # "": not tried
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks look at. The defaults are those of a pool in which all is well."""

    url: str = "redis://127.0.0.1:6379/0"
    pool: str = "main"
    unreachable: str = ""  # why; "" when the server answers
    server: Server = field(default_factory=Server)
    library: str | None = "same"  # version on the server; None: none is loaded
    library_here: str = "same"
    leader: str | None = "clock-a"  # None: nobody holds the lease
    clocks: tuple[str, ...] = ("clock-a", "clock-b")  # those that live
    base_model: str = "mainspring-tiny"  # that the pool was made for; "": no worker has ever registered
    workers: tuple[Worker, ...] = (Worker("w1", base_model="mainspring-tiny"),)
    tenants: int = 1
    unplaced: int = 0  # jobs that wait for a free slot
    probes: tuple[Probe, ...] = ()
    model: Model = field(default_factory=lambda: Model("mainspring-tiny"))
    open_files: int = 65536  # limit of this process


def gather(url: str, pool: str, *, load_model: bool = False) -> Facts:
    """Look at everything once."""
    from redis.exceptions import RedisError

    from mainspring_broker import library
    from mainspring_broker.logs import hide_password

    shown = hide_password(url)
    try:
        with connect(url) as client:
            facts = _of_pool(client, pool, shown)
    except (CommandFailed, RedisError) as error:
        facts = Facts(
            url=shown,
            pool=pool,
            unreachable=str(error).partition("\n")[0],
            base_model="",
            workers=(),
            library_here=library.version(),
        )
    storages = {worker.storage for worker in facts.workers if worker.storage}
    if not storages and (configured := os.environ.get("MAINSPRING_STORAGE")):
        storages = {configured}
    here = {worker.storage for worker in facts.workers if worker.host == socket.gethostname()}
    return replace(
        facts,
        probes=tuple(probe_storage(storage, must_be_here=storage in here) for storage in sorted(storages)),
        model=find_model(facts, load=load_model),
        open_files=_open_files(),
    )


# -- the server and the pool ------------------------------------------------------------------------------------------


def _of_pool(client: Any, pool: str, shown: str) -> Facts:
    from mainspring_broker import keys, library
    from mainspring_broker.errors import LibraryMissing
    from mainspring_ops.view import View

    view = View(client, pool)
    try:
        loaded: str | None = library.loaded_version(client, keys.info(pool))
    except LibraryMissing:
        loaded = None
    tenants = view.tenants()
    return Facts(
        url=shown,
        pool=pool,
        server=_server(client),
        library=loaded,
        library_here=library.version(),
        leader=view.clock().get("leader", "?") if view.has_leader() else None,
        clocks=tuple(name.decode() for name in client.zrange(keys.clocks(pool), 0, -1)),
        base_model=view.info().get("base_model", ""),
        workers=tuple(
            Worker(
                name=worker.name,
                host=worker.fields.get("host", ""),
                state=worker.state,
                silent_ms=worker.silent_ms,
                jobs=worker.jobs,
                slots=worker.slots,
                base_model=worker.fields.get("base_model", ""),
                storage=worker.fields.get("storage", ""),
            )
            for worker in view.workers()
        ),
        tenants=len(tenants),
        unplaced=sum(client.zcard(keys.ready(pool, tenant.name)) for tenant in tenants),
    )


def _server(client: Any) -> Server:
    from redis.exceptions import ResponseError

    from mainspring_broker import library
    from mainspring_broker.errors import ServerUnsupported

    unsupported = ""
    try:
        name = library.check_server(client)
    except ServerUnsupported as error:
        name, unsupported = f"{error.details['server']} {error.details['version']}", error.message
    info = client.info("everything")
    appendfsync = ""
    with contextlib.suppress(ResponseError):  # a hosted server may not tell
        appendfsync = str(client.config_get("appendfsync").get("appendfsync", ""))
    before = time.time()
    seconds, micros = client.time()
    skew_s = (before + time.time()) / 2 - (seconds + micros / 1e6)
    return Server(
        name=name,
        unsupported=unsupported,
        policy=str(info.get("maxmemory_policy", "noeviction")),
        maxmemory=int(info.get("maxmemory", 0)),
        used_memory=int(info.get("used_memory", 0)),
        aof=bool(info.get("aof_enabled", 0)),
        appendfsync=appendfsync,
        aof_error=info.get("aof_last_write_status", "ok") != "ok",
        clients=int(info.get("connected_clients", 0)),
        max_clients=int(info.get("maxclients", 0)),
        skew_s=skew_s,
    )


# -- storage ----------------------------------------------------------------------------------------------------------


def probe_storage(storage: str, *, must_be_here: bool) -> Probe:
    """Write, read and delete a small object, as a worker would."""
    from mainspring_broker.errors import MainspringError

    if "://" not in storage and not Path(storage).exists() and not must_be_here:
        return Probe(storage, "elsewhere", "no such folder on this host")
    try:
        from mainspring_workers.storage import MANIFEST, open_storage
    except ImportError as error:
        return Probe(storage, "elsewhere", f"cannot be tried from here: {error}")
    folder, data = f"doctor-{secrets.token_hex(8)}", b'{"doctor": true}'
    try:
        store = open_storage(storage)
        try:
            store.put(folder, [(MANIFEST, data)])
            if store.read(folder, MANIFEST) != data:
                return Probe(storage, "failed", "what was written is not what was read")
        finally:
            store.remove(folder)
    except (MainspringError, OSError) as error:
        return Probe(storage, "failed", str(error))
    return Probe(storage, "ok")


# -- the base model ---------------------------------------------------------------------------------------------------


def find_model(facts: Facts, *, load: bool) -> Model:
    """Whether the files of the pool's base model (before a worker came: of the configured one) are on this host."""
    from mainspring_broker import base_models
    from mainspring_workers.settings import WorkerSettings

    name = facts.base_model or WorkerSettings().base_model
    path = base_models.resolve(name)
    hosts = {worker.host for worker in facts.workers}
    expected = not hosts or socket.gethostname() in hosts
    folder = Path(path)
    if folder.is_dir():
        missing = _missing(folder)
        found = Model(name, path, True, expected, tuple(missing))
    elif path.startswith(("/", "./", "../", "~")):
        found = Model(name, path, False, expected, (f"the folder {path}",))
    else:
        found = _in_hub_cache(name, expected)
    return _loaded(found) if load else found


def _missing(folder: Path) -> list[str]:
    missing = []
    try:
        json.loads((folder / "config.json").read_text("utf-8"))
    except FileNotFoundError:
        missing.append("config.json")
    except (OSError, ValueError) as error:
        missing.append(f"a readable config.json ({error})")
    if not _any(folder, WEIGHTS):
        missing.append("weights (model.safetensors)")
    if not _any(folder, TOKENIZER):
        missing.append("a tokenizer (tokenizer.json)")
    return missing


def _any(folder: Path, patterns: Iterable[str]) -> bool:
    return any(path.stat().st_size > 0 for pattern in patterns for path in folder.glob(pattern))


def _in_hub_cache(name: str, expected: bool) -> Model:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return Model(name, name, None, expected, detail="huggingface_hub is not installed here")
    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        return Model(name, name, False, expected, ("a folder or Hugging Face id of this name",), detail=str(error))
    if not isinstance(config, str):
        return Model(name, name, False, expected, ("its files in the Hugging Face cache",))
    return Model(name, str(Path(config).parent), True, expected, tuple(_missing(Path(config).parent)))


def _loaded(model: Model) -> Model:
    try:
        from mainspring_workers.base_model import BaseModel

        loaded = BaseModel.load(model.name)
    except Exception as error:  # whatever torch and transformers raise is what the person wants to read
        return replace(model, load="failed", detail=f"{type(error).__name__}: {error}"[:500])
    facts = loaded.facts
    return replace(model, load="ok", detail=f"vocabulary {facts['vocab_size']}, up to {facts['max_length']} tokens")


def _open_files() -> int:
    try:
        import resource
    except ImportError:  # not on Windows
        return 65536
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
