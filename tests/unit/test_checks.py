"""The doctor's checks over facts: in a healthy pool all are ok, and each planted fault is found by the check it belongs to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mainspring_ops.checks import CHECKS, WITHOUT_SERVER, run_checks
from mainspring_ops.facts import Facts, Model, Probe, Server, Worker

HEALTHY = Facts()
W1 = HEALTHY.workers[0]


def server(**changes: Any) -> Facts:
    return replace(HEALTHY, server=replace(Server(), **changes))


def model(**changes: Any) -> Facts:
    return replace(HEALTHY, model=replace(Model("m", "/models/m"), **changes))


def pool(*workers: Worker, **changes: Any) -> Facts:
    return replace(HEALTHY, workers=workers, **changes)


PLANTED = [
    (server(unsupported="Redis 6.2 is too old"), "version", "fault", "6.2"),
    (server(policy="allkeys-lru"), "eviction", "fault", "allkeys-lru"),
    (server(policy="volatile-ttl"), "eviction", "fault", "volatile-ttl"),
    (server(aof=False), "persistence", "fault", "append-only file is off"),
    (server(aof_error=True), "persistence", "fault", "cannot write"),
    (server(appendfsync="no"), "persistence", "warning", "appendfsync is no"),
    (server(maxmemory=0), "memory", "warning", "not set"),
    (server(maxmemory=100, used_memory=80), "memory", "warning", "80%"),
    (server(maxmemory=100, used_memory=95), "memory", "fault", "95%"),
    (server(clients=9000), "connections", "warning", "9000 of 10000"),
    (server(skew_s=-3.0), "time", "warning", "3.0 s behind"),
    (server(skew_s=90.0), "time", "warning", "90.0 s ahead"),
    (replace(HEALTHY, library=None), "library", "fault", "not loaded"),
    (replace(HEALTHY, library="old"), "library", "fault", "function library old"),
    (replace(HEALTHY, leader=None, clocks=()), "clock", "fault", "no clock leads"),
    (replace(HEALTHY, leader=None), "clock", "fault", "2 stand by"),
    (replace(HEALTHY, clocks=("clock-a",)), "clock", "warning", "nobody stands by"),
    (pool(), "workers", "fault", "no worker in pool"),
    (pool(replace(W1, silent_ms=60_000)), "workers", "fault", "w1 silent for 1 min"),
    (pool(W1, replace(W1, name="w2", silent_ms=6_000)), "workers", "warning", "w2 silent for 6 s"),
    (pool(replace(W1, jobs=64)), "slots", "warning", "64 of 64"),
    (pool(replace(W1, jobs=64), unplaced=3), "slots", "warning", "3 jobs waiting"),
    (pool(W1, replace(W1, name="w2", base_model="other")), "base-model", "fault", "other: w2"),
    (model(missing=("config.json",)), "model-files", "fault", "config.json"),
    (model(here=None, detail="no hub"), "model-files", "warning", "no hub"),
    (model(load="failed", detail="OSError: gone"), "model-files", "fault", "OSError: gone"),
    (pool(replace(W1, storage="/a"), replace(W1, name="w2", storage="/b")), "storage", "fault", "/a: w1; /b: w2"),
    (replace(HEALTHY, probes=(Probe("/a", "failed", "Read-only file system"),)), "storage", "fault", "Read-only"),
    (replace(HEALTHY, probes=(Probe("/a", "elsewhere", "no such folder"),)), "storage", "warning", "no such folder"),
    (replace(HEALTHY, tenants=0), "tenants", "warning", "no tenant"),
    (replace(HEALTHY, open_files=256), "open-files", "warning", "256"),
    (replace(HEALTHY, unreachable="refused"), "server", "fault", "refused"),
]


def test_all_is_well_in_a_healthy_pool() -> None:
    findings = run_checks(HEALTHY)
    assert [finding.check for finding in findings] == list(CHECKS)
    assert {finding.level for finding in findings} == {"ok"}, findings
    assert not any(finding.todo for finding in findings)


@pytest.mark.parametrize(("facts", "check", "level", "said"), PLANTED)
def test_each_planted_fault_is_found_by_its_own_check(facts: Facts, check: str, level: str, said: str) -> None:
    [found] = [finding for finding in run_checks(facts) if finding.level != "ok"]
    assert (found.check, found.level) == (check, level)
    assert said in found.said
    assert found.todo


def test_every_check_has_a_planted_fault() -> None:
    assert {check for _, check, _, _ in PLANTED} == set(CHECKS)


def test_only_the_checks_asked_for_run() -> None:
    assert [finding.check for finding in run_checks(HEALTHY, frozenset({"clock", "slots"}))] == ["clock", "slots"]


def test_without_a_server_only_what_needs_none_is_checked() -> None:
    found = run_checks(replace(HEALTHY, unreachable="refused"))
    assert {finding.check for finding in found} == WITHOUT_SERVER


def test_a_model_that_only_workers_elsewhere_need_is_no_fault_here() -> None:
    [found] = run_checks(model(missing=("the folder /models/m",), expected=False), frozenset({"model-files"}))
    assert found.level == "ok"
    assert "on a worker's host" in found.todo
