"""Clocks are killed and frozen, connections are cut, while jobs train: nothing is lost, nothing is done twice.

The short run is part of every test run; `make chaos` lets it go on for longer (CHAOS_SECONDS).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
import redis

import mainspring as trio
from mainspring_broker import functions, keys
from mainspring_broker.errors import NotLeader
from tests.helpers import wait_until
from tests.integration.training import MINE, NEIGHBOURS, TOLERANCE, Recipe, to_sdk, weights
from tests.service import Service, running_service

LEASE_MS = 1000
RECIPES = [MINE, *NEIGHBOURS[:3]]

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("pool"), clocks=2, lease_ms=LEASE_MS) as running:
        yield running


def leader(service: Service) -> str:
    """The name of the process whose clock leads, by its log."""
    name = functions.text(service.redis.hget(keys.clock(service.pool), "leader"))
    return next((p for p in service.processes if p.startswith("clock") and f"clock {name} leads" in service.log(p)), "")


def test_the_standby_takes_over_within_the_lease_and_the_old_clocks_tick_is_refused(service: Service) -> None:
    old_token = functions.text(service.redis.get(keys.lease(service.pool)))
    old = wait_until(lambda: leader(service), "a leader is known")
    service.kill(old)
    killed = time.monotonic()
    new_token = wait_until(
        lambda: (t := service.redis.get(keys.lease(service.pool))) and functions.text(t) != old_token and t,
        "another clock leads",
    )
    # The lease of the dead clock ran out, and then one reaction of the standby; generous, for a busy machine.
    assert time.monotonic() - killed < 3 * LEASE_MS / 1000
    with pytest.raises(NotLeader):
        functions.run(
            service.redis,
            functions.tick(
                pool=service.pool,
                token=old_token,
                lease_ms=LEASE_MS,
                budget_tokens=1000,
                dead_after_ms=10_000,
                history=10,
                batch_seed="stale",
            ),
        )
    assert service.redis.get(keys.lease(service.pool)) == new_token
    service.start("clock", old)


async def test_training_comes_out_the_same_whatever_happens_to_clocks_and_connections(service: Service) -> None:
    seconds = float(os.environ.get("CHAOS_SECONDS", "15"))
    rng = random.Random(1)
    done = asyncio.Event()
    counts = {"kill": 0, "freeze": 0, "cut": 0}

    async with trio.ServiceClient(service.url) as client:
        jobs = [await recipe.create(client, "chaos") for recipe in RECIPES]

        async def train(recipe: Recipe, job: trio.TrainingClient) -> int:
            """Pipelined updates until the storm is over; how many."""
            waiting: list[trio.APIFuture[trio.OptimStepResponse]] = []
            updates = 0
            while not done.is_set() or updates < 5:
                await job.forward_backward_async(to_sdk(recipe.datums(updates)), "cross_entropy")
                waiting.append(await job.optim_step_async(recipe.adam))
                updates += 1
                if len(waiting) > 2:
                    await waiting.pop(0)
            steps = [(await future).metrics["step"] for future in waiting]
            assert steps[-1] == updates
            return updates

        storm = asyncio.create_task(asyncio.to_thread(_storm, service, rng, seconds, counts))
        storm.add_done_callback(lambda _: done.set())
        updates = await asyncio.gather(*(train(recipe, job) for recipe, job in zip(RECIPES, jobs, strict=True)))
        await storm
        disturbed = [await weights(service, job, "end") for job in jobs]
        assert counts["kill"] + counts["freeze"] + counts["cut"] >= 3, counts

        differences = {}
        for recipe, count, ours in zip(RECIPES, updates, disturbed, strict=True):
            calm = await recipe.create(client, "calm")
            for update in range(count):
                await calm.forward_backward_async(to_sdk(recipe.datums(update)), "cross_entropy")
                last = await calm.optim_step_async(recipe.adam)
            await last
            theirs = await weights(service, calm, "end")
            differences[recipe.name] = max(
                float((a - b).abs().max()) for n in ours for a, b in zip(ours[n], theirs[n], strict=True)
            )
            await (await calm.end_async())
        for job in jobs:
            await (await job.end_async())
    print(f"\n{counts} over {seconds:.0f} s, updates {updates}, largest differences of any weight {differences}")
    assert max(differences.values()) <= TOLERANCE


def _storm(service: Service, rng: random.Random, seconds: float, counts: dict[str, int]) -> None:
    """Random trouble for a while; at the end everything runs again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.2, 1.0))  # trouble comes when it wants, there is nothing to wait for
        what = rng.choice(["kill", "freeze", "cut", "cut"])
        clock = leader(service)
        if what == "cut":
            _cut_connections(service, rng)
        elif not clock:
            continue
        elif what == "kill":
            service.kill(clock)
            service.start("clock", clock)
        else:  # frozen for longer than the lease, it wakes up and believes that it leads
            process = service.processes[clock]
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5 * LEASE_MS / 1000)
            process.send_signal(signal.SIGCONT)
        counts[what] += 1


def _cut_connections(service: Service, rng: random.Random) -> None:
    """Cut a third of all connections but our own, subscriptions among them."""
    ours = service.redis.client_id()
    for kind in ("normal", "pubsub"):
        for entry in service.redis.client_list(_type=kind):
            if int(entry["id"]) != ours and rng.random() < 1 / 3:
                try:
                    service.redis.client_kill_filter(_id=entry["id"])
                except redis.ResponseError:  # gone by itself
                    continue
