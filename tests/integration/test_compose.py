"""docker-compose.yml: every service runs from the file's own lines, and three workers train as correctly as one."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import mainspring as trio
from mainspring.settings import ClientSettings
from mainspring_broker import keys
from mainspring_clock.settings import ClockSettings
from mainspring_ops.checks import run_checks
from mainspring_ops.facts import gather
from mainspring_workers.settings import WorkerSettings
from tests.compose import ROOT, Replica, Stack, read_compose, read_env
from tests.doc_tables import metrics_rows
from tests.helpers import wait_until
from tests.integration.training import MINE, NEIGHBOURS, TOLERANCE, Recipe, compare, oracle_of, train, weights

START_S = 150
UPDATES = 3
SETTINGS = {
    f"MAINSPRING_{name.upper()}"
    for settings in (ClockSettings, WorkerSettings, ClientSettings)
    for name in settings.model_fields
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {**read_env(ROOT / ".env.example"), "MAINSPRING_THREADS": "1"}
    running = Stack(tmp_path_factory.mktemp("compose") / "stack", environment)
    try:
        for service in ("valkey", "clock", "worker"):
            for needed in running.services[service].get("depends_on", {}):
                assert list(running.of(needed)), f"{service} needs {needed} first"
            running.up(service)
            for replica in list(running.of(service)):
                wait_until(lambda r=replica: running.healthy(r), f"{service} is healthy", timeout=START_S)
        yield running
    finally:
        running.kill()


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[trio.ServiceClient]:
    with trio.ServiceClient(stack.url) as connected:
        yield connected


async def trained_like_the_oracle(
    server: redis.Redis, client: trio.ServiceClient, recipes: list[Recipe], prefix: str
) -> list[bytes | None]:
    """Train, compare and end a job for each recipe. Returns the worker of each."""
    jobs = [await recipe.create(client, prefix) for recipe in recipes]
    starts = [await weights(None, job, "start") for job in jobs]  # type: ignore[arg-type]
    said = await asyncio.gather(*(train(recipe, job, UPDATES) for recipe, job in zip(recipes, jobs, strict=True)))
    for recipe, job, start, each in zip(recipes, jobs, starts, said, strict=True):
        oracle = oracle_of(recipe, start)
        compare(recipe, oracle, each)
        assert oracle.difference(await weights(None, job, "end")) <= TOLERANCE, recipe.name  # type: ignore[arg-type]
    placed = [server.hget(keys.job("main", "default", f"{prefix}-{recipe.name}"), "worker") for recipe in recipes]
    for job in jobs:
        await (await job.end_async())
    return placed


# -- running it (in this order: the last test takes it down) ----------------------------------------------------------


@pytest.mark.timeout(400)
def test_every_service_runs_and_is_healthy_by_its_own_check(stack: Stack) -> None:
    assert {replica.service for replica in stack.replicas} == set(stack.services)
    assert len(list(stack.of("clock"))) == 2
    for replica in stack.replicas:
        assert stack.healthy(replica)
    facts = gather(stack.url, "main")
    assert [f for f in run_checks(facts) if f.level != "ok" and f.check != "open-files"] == []
    assert len(facts.clocks) == 2
    with redis.Redis.from_url(stack.url) as server:
        settings = server.config_get("*")
    read = {
        line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1].strip('"')
        for line in (ROOT / "ops/redis.conf").read_text().splitlines()
        if line and not line.startswith("#")
    }
    for name in ("appendonly", "appendfsync", "maxmemory-policy", "save", "tcp-keepalive"):
        assert settings[name] == read[name], name


async def test_one_worker_trains_correctly(stack: Stack, client: trio.ServiceClient) -> None:
    with redis.Redis.from_url(stack.url) as server:
        await trained_like_the_oracle(server, client, [MINE], "one")
    assert list(stack.volume("storage").glob("storage/**/adapter_model.safetensors"))  # in the volume, not beside it


@pytest.mark.timeout(400)
async def test_scaled_to_three_workers_the_jobs_spread_and_train_correctly(
    stack: Stack, client: trio.ServiceClient
) -> None:
    stack.up("worker", replicas=3)
    with redis.Redis.from_url(stack.url) as server:
        wait_until(lambda: server.zcard(keys.workers("main")) == 3, "three workers are there", timeout=START_S)
        placed = await trained_like_the_oracle(server, client, [MINE, *NEIGHBOURS[:5]], "three")
        cycles = server.xrevrange(keys.cycles("main"), count=20)
    assert {placed.count(worker) for worker in set(placed)} == {2}  # six jobs on three workers
    assert any(fields[b"workers"].count(b"compute_ms") > 1 for _, fields in cycles)  # at the same time


def scrape(replica: Replica) -> dict[str, float]:
    """The samples that a process serves, by name and labels."""
    port = replica.environment["MAINSPRING_METRICS_PORT"]
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_the_metrics_tell_what_has_run(stack: Stack) -> None:
    clocks, workers = [scrape(r) for r in stack.of("clock")], [scrape(r) for r in stack.of("worker")]
    [leader] = [samples for samples in clocks if samples["mainspring_clock_leader"] == 1]
    [standby] = [samples for samples in clocks if samples["mainspring_clock_leader"] == 0]
    with redis.Redis.from_url(stack.url) as server:
        cycles = [fields for _, fields in server.xrange(keys.cycles("main"))]
    assert leader["mainspring_cycles_total"] == len(cycles)
    assert leader["mainspring_cycle_seconds_count"] == len(cycles)
    assert leader["mainspring_cycle_requests_total"] == sum(int(fields[b"requests"]) for fields in cycles)
    assert leader["mainspring_cycle_tokens_sum"] == sum(int(fields[b"tokens"]) for fields in cycles)
    assert leader["mainspring_pool_clocks"] == 2
    assert leader["mainspring_pool_workers"] == 3
    assert leader["mainspring_pool_slots"] == 3 * 64
    assert leader["mainspring_pool_backlog_requests"] == leader["mainspring_pool_backlog_tokens"] == 0
    assert len([name for name in leader if name.startswith("mainspring_worker_heartbeat_age_seconds{")]) == 3
    assert not any(name.startswith("mainspring_pool") for name in standby)
    steps = 'mainspring_requests_total{op="optim_step",outcome="ok"}'
    assert sum(samples.get(steps, 0) for samples in workers) == UPDATES * (1 + 6)  # one job alone, then six
    assert (
        sum(samples["mainspring_worker_tokens_total"] for samples in workers) == leader["mainspring_cycle_tokens_sum"]
    )
    names = {
        re.sub(r"(_bucket|_sum|_count|_created)?(\{.*)?$", "", name)
        for samples in (leader, *workers)
        for name in samples
    }
    served = {name for name in names if name.startswith("mainspring_")}
    assert {row[0] for row in metrics_rows()} == {name for name in served if f"{name}_total" not in served}


def test_the_logs_are_json_with_a_line_for_each_cycle(stack: Stack) -> None:
    with redis.Redis.from_url(stack.url) as server:
        cycles = [int(entry.partition(b"-")[0]) for entry, _ in server.xrange(keys.cycles("main"))]
    lines = [json.loads(line) for replica in stack.of("clock") for line in replica.log.read_text().splitlines()]
    closed = [line for line in lines if line["message"] == "cycle closed"]
    assert [line["cycle"] for line in closed] == cycles
    assert all({"jobs", "requests", "tokens", "ms"} <= line.keys() for line in closed)
    lines = [
        json.loads(line)
        for replica in stack.of("worker")
        for line in replica.log.read_text().splitlines()
        if line.startswith("{")  # transformers shows its progress
    ]
    committed = [line for line in lines if line["message"] == "batch committed"]
    assert {line["cycle"] for line in committed} == set(cycles)
    assert all({"jobs", "tokens", "fetch_ms", "compute_ms", "commit_ms"} <= line.keys() for line in committed)


@pytest.mark.timeout(200)
def test_it_goes_down_in_an_orderly_way(stack: Stack) -> None:
    processes = [replica.process for replica in stack.replicas]
    assert set(stack.down().values()) == {0}
    assert len(processes) == 6
    assert not any(process.poll() is None for process in processes)


# -- the files --------------------------------------------------------------------------------------------------------


def test_every_service_restarts_and_has_a_health_check() -> None:
    file = read_compose({})
    for name, service in file["services"].items():
        assert service["restart"] == "unless-stopped", name
        assert service["healthcheck"]["test"], name
        named = {volume.split(":")[0] for volume in service.get("volumes", []) if not volume.startswith("./")}
        assert named <= set(file["volumes"]), name


def test_the_example_environment_is_the_file_s_own_defaults_and_all_of_them() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    defaults = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    assert read_env(ROOT / ".env.example") == defaults
    ours = {
        name for name in re.findall(r"\bMAINSPRING_\w+", text) if name not in ("MAINSPRING_IMAGE", "MAINSPRING_PORT")
    }
    assert ours <= SETTINGS


def test_the_example_environment_has_the_processes_own_defaults() -> None:
    example = read_env(ROOT / ".env.example")
    differs = {"MAINSPRING_STORAGE", "MAINSPRING_LOG_FORMAT"}
    for settings in (ClockSettings, WorkerSettings):
        for name, spec in settings.model_fields.items():
            variable = f"MAINSPRING_{name.upper()}"
            if variable in example and variable not in differs:
                assert example[variable] == str(spec.default), variable


def test_the_dockerfile_copies_what_there_is_and_all_that_is_needed() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.M)
    assert read_compose({})["services"]["worker"]["build"]["target"] in stages
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    sources = set()
    for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.M):
        *paths, _ = line.split()
        for path in paths:
            assert (ROOT / path).exists(), path
            assert f"!{path}" in ignored, path
            sources.add(path)
    for stage in re.findall(r"--from=(\S+)", dockerfile):
        assert stage in stages
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for package in packages:
        assert sources & {package, str(Path(package).parent)}, f"{package} is not copied into the image"
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= sources
    runtime = dockerfile[dockerfile.index("AS runtime") :]
    assert re.search(r"^USER (?!root)", runtime, re.M)
