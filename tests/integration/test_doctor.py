"""`mainspring doctor` and `mainspring health` on real servers and pools with faults planted into them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from mainspring_broker import base_models, keys, library
from mainspring_ops.checks import run_checks
from mainspring_ops.facts import find_model, gather, probe_storage
from tests.conftest import Server
from tests.helpers import Scene, wait_until
from tests.service import Service


def cli(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAINSPRING_")}
    return subprocess.run(
        [sys.executable, "-m", "mainspring_ops", *words],
        env={**environment, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def found_in(url: str, pool: str, check: str) -> tuple[str, str]:
    """Level and words of one check, in this process."""
    [finding] = run_checks(gather(url, pool), frozenset({check}))
    return finding.level, finding.said


# -- a pool in which all is well --------------------------------------------------------------------------------------


def test_a_running_pool_has_no_fault(service: Service) -> None:
    service.redis.config_set("maxmemory", "1gb")
    service.redis.config_set("appendonly", "yes")
    done = cli("doctor", "--json", "--load-model", "--url", service.url, "--pool", service.pool)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert {name for name, finding in found.items() if finding["level"] == "fault"} == set()
    assert done.returncode == 0
    assert "vocabulary 1024" in found["model-files"]["said"]
    assert str(service.storage) in found["storage"]["said"]
    assert list(service.storage.glob("*doctor*")) == []
    said = cli("doctor", "--url", service.url, "--only", "clock,workers")
    assert said.returncode == 0
    assert "nobody stands by" in said.stdout
    assert "→ start a second clock" in said.stdout


def test_health_is_about_this_hosts_own_processes(service: Service, scene: Scene, server: Server) -> None:
    for process in ("clock", "worker"):
        assert cli("health", process, "--url", service.url).returncode == 0
        for url in (server.url, "redis://127.0.0.1:1/0"):  # a pool without processes; no server at all
            assert cli("health", process, "--url", url, "--pool", scene.pool).returncode == 1
    scene.lead(name="elsewhere-abc123")
    scene.register(host="elsewhere")
    for process in ("clock", "worker"):
        done = cli("health", process, "--url", server.url, "--pool", scene.pool)
        assert done.returncode == 1
        assert socket.gethostname() in done.stderr


# -- planted faults ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "check"),
    [
        ("maxmemory-policy", "allkeys-lru", "eviction"),
        ("appendonly", "no", "persistence"),
        ("maxmemory", "1mb", "memory"),
    ],
)
def test_a_server_that_could_lose_work_is_found(own_server: Server, setting: str, value: str, check: str) -> None:
    own_server.client().config_set(setting, value)
    assert found_in(own_server.url, "main", check)[0] == "fault"


def test_a_pool_without_processes_or_with_an_old_library_is_found(scene: Scene, server: Server) -> None:
    done = cli("doctor", "--url", server.url, "--pool", scene.pool)
    assert done.returncode == 1
    faults = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("fault")}
    assert {"clock", "workers"} <= faults
    assert "library" not in faults
    scene.r.function_load(library.code().replace(library.version(), "another"), replace=True)
    assert found_in(server.url, scene.pool, "library")[0] == "fault"
    scene.r.function_delete(library.LIBRARY)
    assert "not loaded" in found_in(server.url, scene.pool, "library")[1]


def test_storage_that_cannot_be_written_or_differs_is_found(scene: Scene, server: Server, tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.write_text("a file where a folder should be")
    scene.register("w1", host=socket.gethostname(), storage=str(bad))
    level, said = found_in(server.url, scene.pool, "storage")
    assert (level, str(bad) in said) == ("fault", True)
    scene.register("w1", host=socket.gethostname(), storage=str(good))
    assert found_in(server.url, scene.pool, "storage")[0] == "ok"
    scene.register("w2", host="elsewhere", storage="/mnt/other")
    assert "different storage" in found_in(server.url, scene.pool, "storage")[1]
    scene.requeue("w2")
    good.rmdir()
    assert found_in(server.url, scene.pool, "storage")[0] == "fault"


def test_a_missing_model_is_found(
    scene: Scene, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = gather(server.url, scene.pool)
    assert facts.model.missing == ()  # no worker yet: the shipped model
    whole = Path(base_models.resolve("mainspring-tiny"))
    for gone in ("config.json", "tokenizer.json", "model.safetensors"):
        folder = tmp_path / f"without-{gone}"
        folder.mkdir()
        for path in whole.iterdir():
            if path.name != gone:
                (folder / path.name).symlink_to(path)
        monkeypatch.setenv("MAINSPRING_BASE_MODEL", str(folder))
        [missing] = find_model(facts, load=False).missing
        assert gone.partition(".")[0] in missing
    monkeypatch.setenv("MAINSPRING_BASE_MODEL", str(tmp_path / "nowhere"))
    assert find_model(facts, load=False).here is False
    monkeypatch.setenv("MAINSPRING_BASE_MODEL", "nobody/has-this-model")
    assert find_model(facts, load=False).missing == ("its files in the Hugging Face cache",)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("MAINSPRING_BASE_MODEL", str(tmp_path / "empty"))
    assert find_model(facts, load=True).load == "failed"


def test_storage_of_another_host_is_said_to_be_there(tmp_path: Path) -> None:
    assert probe_storage(str(tmp_path / "not-here"), must_be_here=False).result == "elsewhere"
    assert probe_storage(str(tmp_path), must_be_here=True).result == "ok"
    assert probe_storage("memory://doctor", must_be_here=False).result == "ok"
    assert probe_storage("nonsense://doctor", must_be_here=False).result == "failed"


def test_an_unreachable_server_and_an_unknown_check_are_said(own_server: Server) -> None:
    own_server.kill()
    assert found_in(own_server.url, "main", "server")[0] == "fault"
    done = cli("doctor", "--only", "clok")
    assert done.returncode == 1
    assert "no such check: clok" in done.stderr


# -- processes that refuse to start -----------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["mainspring_clock", "mainspring_workers"])
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_clock_and_worker_refuse_a_server_that_evicts(
    own_server: Server, module: str, policy: str, tmp_path: Path
) -> None:
    own_server.client().config_set("maxmemory-policy", policy)
    settings = {"MAINSPRING_URL": own_server.url, "MAINSPRING_STORAGE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module], env={**os.environ, **settings}, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if policy in line]
    assert "eviction_policy_unsafe" in line
    assert "noeviction" in line
    assert "Traceback" not in done.stderr


def test_a_frozen_clock_is_not_healthy(own_server: Server) -> None:
    """Alive as a process, and yet of no use: its sign of life runs out."""
    settings = {"MAINSPRING_URL": own_server.url, "MAINSPRING_LEASE_MS": "300"}
    clock = subprocess.Popen([sys.executable, "-m", "mainspring_clock"], env={**os.environ, **settings})
    try:
        client = own_server.client()
        wait_until(lambda: client.zcard(keys.clocks("main")), "the clock is on the list")
        assert cli("health", "clock", "--url", own_server.url).returncode == 0
        clock.send_signal(signal.SIGSTOP)
        wait_until(lambda: not client.zcard(keys.clocks("main")), "the frozen clock drops off the list")
        assert cli("health", "clock", "--url", own_server.url).returncode == 1
    finally:
        clock.kill()
        clock.wait(30)


def test_redis_is_as_good_as_valkey(any_server: Server) -> None:
    with redis.Redis.from_url(any_server.url) as client:
        name = library.check_server(client)
    found = gather(any_server.url, "main").server
    assert (found.name, found.policy) == (name, "noeviction")
