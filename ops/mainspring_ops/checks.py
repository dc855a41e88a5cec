"""The checks of `mainspring doctor`: pure functions from facts to findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mainspring_ops.facts import Facts
from mainspring_ops.terminal import ago

Level = Literal["ok", "warning", "fault"]

SILENT_MS = 5_000  # a worker says that it lives every second
NEARLY_FULL, FULL = 0.75, 0.9  # of maxmemory
SKEW_S = 1.0
OPEN_FILES = 1024
CLIENTS = 0.8  # of maxclients


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check says."""

    check: str
    level: Level
    said: str  # what is so
    todo: str = ""  # what to do about it


def run_checks(facts: Facts, only: frozenset[str] = frozenset()) -> list[Finding]:
    """All checks, or those named in `only`. When the server does not answer, only what needs no server."""
    names = [name for name in CHECKS if not only or name in only]
    if facts.unreachable:
        names = [name for name in names if name in WITHOUT_SERVER]
    return [CHECKS[name](facts) for name in names]


# -- the server -------------------------------------------------------------------------------------------------------


def server(facts: Facts) -> Finding:
    if facts.unreachable:
        return Finding("server", "fault", facts.unreachable, "start it, or name the right one: --url or MAINSPRING_URL")
    return Finding("server", "ok", f"{facts.url} answers")


def version(facts: Facts) -> Finding:
    if facts.server.unsupported:
        return Finding("version", "fault", facts.server.unsupported, "upgrade to Redis 7.0 or Valkey 8, or later")
    return Finding("version", "ok", facts.server.name)


def eviction(facts: Facts) -> Finding:
    policy = facts.server.policy
    if policy != "noeviction":
        said = f"maxmemory-policy is {policy}: with its memory full the server throws away requests and results"
        return Finding(
            "eviction", "fault", said, "CONFIG SET maxmemory-policy noeviction, and in its configuration file"
        )
    return Finding("eviction", "ok", "maxmemory-policy noeviction")


def persistence(facts: Facts) -> Finding:
    s = facts.server
    if not s.aof:
        said = "the append-only file is off: a restart of the server loses every job"
        return Finding("persistence", "fault", said, "CONFIG SET appendonly yes, and in its configuration file")
    if s.aof_error:
        return Finding(
            "persistence", "fault", "the server cannot write its append-only file", "look at its disk and log"
        )
    if s.appendfsync == "no":
        said = "appendfsync is no: a crash of the machine may take back half a minute"
        return Finding("persistence", "warning", said, "CONFIG SET appendfsync everysec, and in its configuration file")
    return Finding("persistence", "ok", f"append-only file on, appendfsync {s.appendfsync or 'not told'}")


def memory(facts: Facts) -> Finding:
    used, limit = facts.server.used_memory, facts.server.maxmemory
    if not limit:
        said = f"maxmemory is not set, {_bytes(used)} used: when the machine is full the kernel kills the server"
        return Finding("memory", "warning", said, "CONFIG SET maxmemory 4gb (or what the machine can spare)")
    said = f"{_bytes(used)} of {_bytes(limit)} used ({used / limit:.0%})"
    if used >= FULL * limit:
        return Finding("memory", "fault", said, "raise maxmemory: a full server refuses new requests (ServerFull)")
    if used >= NEARLY_FULL * limit:
        return Finding("memory", "warning", said, "raise maxmemory, or let clients read their results")
    return Finding("memory", "ok", said)


def connections(facts: Facts) -> Finding:
    s = facts.server
    said = f"{s.clients} of {s.max_clients} connections in use"
    if s.max_clients and s.clients >= CLIENTS * s.max_clients:
        return Finding("connections", "warning", said, "raise the server's maxclients (and its limit of open files)")
    return Finding("connections", "ok", said)


def clock_skew(facts: Facts) -> Finding:
    skew = facts.server.skew_s
    if abs(skew) > SKEW_S:
        said = f"this host's clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the server's"
        return Finding("time", "warning", said, "let NTP set both; ages and deadlines that people read are off by this")
    return Finding("time", "ok", f"this host's clock and the server's differ by {abs(skew) * 1000:.0f} ms")


def library(facts: Facts) -> Finding:
    if facts.library is None:
        return Finding("library", "fault", "the function library is not loaded", "start a clock: mainspring clock")
    if facts.library != facts.library_here:
        said = f"the server runs function library {facts.library}, this installation has {facts.library_here}"
        return Finding("library", "fault", said, "install one version everywhere, then restart the clocks first")
    return Finding("library", "ok", f"function library {facts.library}")


# -- the pool ---------------------------------------------------------------------------------------------------------


def clock(facts: Facts) -> Finding:
    if facts.leader is None:
        waiting = f" ({len(facts.clocks)} stand by)" if facts.clocks else ""
        said = f"no clock leads pool {facts.pool}{waiting}: nothing is executed"
        return Finding("clock", "fault", said, f"start one: mainspring clock --pool {facts.pool}")
    standbys = [name for name in facts.clocks if name != facts.leader]
    if not standbys:
        todo = "start a second clock, on another host if there is one: it takes over within the lease"
        return Finding("clock", "warning", f"{facts.leader} leads, nobody stands by", todo)
    return Finding("clock", "ok", f"{facts.leader} leads, {', '.join(standbys)} stand{'s' * (len(standbys) == 1)} by")


def workers(facts: Facts) -> Finding:
    if not facts.workers:
        return Finding("workers", "fault", f"no worker in pool {facts.pool}", "start one: mainspring worker")
    silent = [worker for worker in facts.workers if worker.silent_ms > SILENT_MS]
    said = ", ".join(f"{worker.name} silent for {ago(worker.silent_ms)}" for worker in silent)
    todo = "look at its log and its host; the clock takes it out and places its jobs anew"
    if len(silent) == len(facts.workers):
        return Finding("workers", "fault", f"no worker lives: {said}", todo)
    if silent:
        return Finding("workers", "warning", said, todo)
    oldest = max(worker.silent_ms for worker in facts.workers)
    return Finding(
        "workers", "ok", f"{_count(len(facts.workers), 'worker')} alive, heartbeat {ago(oldest)} old at most"
    )


def slots(facts: Facts) -> Finding:
    total = sum(worker.slots for worker in facts.workers)
    used = sum(worker.jobs for worker in facts.workers)
    said = f"{used} of {total} slots in use"
    if facts.unplaced and used >= total:
        said += f", {_count(facts.unplaced, 'job')} waiting for one"
    if total and used >= total:
        return Finding("slots", "warning", said, "start one more worker, raise MAINSPRING_SLOTS, or end jobs")
    return Finding("slots", "ok", said)


def base_model(facts: Facts) -> Finding:
    by_model: dict[str, list[str]] = defaultdict(list)
    for worker in facts.workers:
        by_model[worker.base_model or facts.base_model].append(worker.name)
    if facts.workers and set(by_model) != {facts.base_model}:
        served = "; ".join(f"{model}: {', '.join(names)}" for model, names in sorted(by_model.items()))
        said = f"pool {facts.pool} is for {facts.base_model}, its workers serve {served}"
        return Finding("base-model", "fault", said, "one pool has one base model: give others a pool of their own")
    return Finding("base-model", "ok", f"all workers serve {facts.base_model or '(none yet)'}")


def model_files(facts: Facts) -> Finding:
    model = facts.model
    if model.load == "failed":
        return Finding("model-files", "fault", f"{model.name} cannot be loaded: {model.detail}", _NEEDS_MODEL)
    if model.missing and model.expected:
        said = f"{model.name} is not whole here: {', '.join(model.missing)} missing"
        return Finding("model-files", "fault", said, _NEEDS_MODEL)
    if model.missing:
        said = f"{model.name} is not on this host, which runs no worker"
        return Finding("model-files", "ok", said, "run `mainspring doctor` on a worker's host to check it there")
    if model.here is None:
        todo = "run `mainspring doctor` on a worker's host"
        return Finding("model-files", "warning", f"{model.name} cannot be looked for: {model.detail}", todo)
    more = f"loaded: {model.detail}" if model.load else "configuration, weights and tokenizer are there"
    return Finding("model-files", "ok", f"{model.name}: {more}")


_NEEDS_MODEL = "put the model's folder there (config.json, *.safetensors, tokenizer.json), or fix MAINSPRING_BASE_MODEL"


def storage(facts: Facts) -> Finding:
    by_storage: dict[str, list[str]] = defaultdict(list)
    for worker in facts.workers:
        by_storage[worker.storage].append(worker.name)
    if len(by_storage) > 1:
        said = "workers write to different storage: " + "; ".join(
            f"{place or '(none told)'}: {', '.join(names)}" for place, names in sorted(by_storage.items())
        )
        return Finding("storage", "fault", said, "give all workers one MAINSPRING_STORAGE that all of them see")
    for probe in facts.probes:
        if probe.result == "failed":
            said = f"{probe.storage} cannot be written, read and deleted: {probe.detail}"
            return Finding("storage", "fault", said, "mount it, and let the user of the workers write there")
    for probe in facts.probes:
        if probe.result == "elsewhere":
            todo = "run `mainspring doctor` on a worker's host to check it there"
            return Finding("storage", "warning", f"{probe.storage}: {probe.detail}", todo)
    if not facts.probes:
        return Finding("storage", "ok", "no worker has told a storage yet")
    return Finding("storage", "ok", f"{facts.probes[0].storage} can be written, read and deleted")


def tenants(facts: Facts) -> Finding:
    if not facts.tenants:
        return Finding("tenants", "warning", "no tenant may use the pool", "mainspring tenants add NAME")
    return Finding("tenants", "ok", _count(facts.tenants, "tenant"))


def open_files(facts: Facts) -> Finding:
    said = f"a process may open {facts.open_files} files"
    if facts.open_files < OPEN_FILES:
        return Finding(
            "open-files", "warning", said, f"ulimit -n {OPEN_FILES} or more for clocks, workers and the server"
        )
    return Finding("open-files", "ok", said)


CHECKS: dict[str, Callable[[Facts], Finding]] = {
    "server": server,
    "version": version,
    "eviction": eviction,
    "persistence": persistence,
    "memory": memory,
    "connections": connections,
    "time": clock_skew,
    "library": library,
    "clock": clock,
    "workers": workers,
    "slots": slots,
    "base-model": base_model,
    "model-files": model_files,
    "storage": storage,
    "tenants": tenants,
    "open-files": open_files,
}
WITHOUT_SERVER = frozenset({"server", "model-files", "storage", "open-files"})


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
