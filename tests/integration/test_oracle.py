"""Through the whole service, a job is trained to the weights that a plain PEFT loop gives it, whoever shares its cycles."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

import mainspring as trio
from tests.integration.training import MINE, NEIGHBOURS, TOLERANCE, compare, oracle_of, to_sdk, train, weights
from tests.service import Service

UPDATES = 20
RUNS = count()


@pytest.mark.parametrize("pieces", [1, 2, 4])
async def test_alone_a_job_equals_the_oracle(service: Service, client: trio.ServiceClient, pieces: int) -> None:
    async with await MINE.create(client, f"alone{next(RUNS)}") as mine:
        oracle = oracle_of(MINE, await weights(service, mine, "start"))
        said = await train(MINE, mine, UPDATES, pieces)
        compare(MINE, oracle, said)
        assert oracle.difference(await weights(service, mine, "end")) <= TOLERANCE


async def test_with_seven_neighbours_every_job_equals_its_oracle(service: Service, client: trio.ServiceClient) -> None:
    recipes = [MINE, *NEIGHBOURS]
    prefix = f"together{next(RUNS)}"
    jobs = [await recipe.create(client, prefix) for recipe in recipes]
    starts = [await weights(service, job, "start") for job in jobs]
    said = await asyncio.gather(*(train(r, job, UPDATES) for r, job in zip(recipes, jobs, strict=True)))
    for recipe, job, start, each in zip(recipes, jobs, starts, said, strict=True):
        oracle = oracle_of(recipe, start)
        compare(recipe, oracle, each)
        assert oracle.difference(await weights(service, job, "end")) <= TOLERANCE, recipe.name
    for job in jobs:
        await (await job.end_async())


async def test_two_updates_queued_before_any_result_equal_two_awaited_ones(
    service: Service, client: trio.ServiceClient
) -> None:
    prefix = f"queued{next(RUNS)}"
    async with await MINE.create(client, prefix) as queued, await MINE.create(client, prefix + "b") as awaited:
        futures = []
        for update in range(2):
            futures.append(await queued.forward_backward_async(to_sdk(MINE.datums(update)), "cross_entropy"))
            futures.append(await queued.optim_step_async(MINE.adam))
        for future in futures:
            await future
        for update in range(2):
            await (await awaited.forward_backward_async(to_sdk(MINE.datums(update)), "cross_entropy"))
            await (await awaited.optim_step_async(MINE.adam))
        ours, theirs = await weights(service, queued, "end"), await weights(service, awaited, "end")
        assert all((a - b).abs().max() <= 1e-6 for n in ours for a, b in zip(ours[n], theirs[n], strict=True))


async def test_a_neighbours_weight_decay_nan_and_deletion_change_nothing_of_mine(
    service: Service, client: trio.ServiceClient
) -> None:
    prefix = f"bad{next(RUNS)}"
    mine = await MINE.create(client, prefix)
    decaying, broken, leaving = [await recipe.create(client, prefix) for recipe in NEIGHBOURS[:3]]
    oracle = oracle_of(MINE, await weights(service, mine, "start"))
    stop = asyncio.Event()

    async def decay() -> None:
        adam = trio.AdamParams(learning_rate=0.1, weight_decay=5.0)
        while not stop.is_set():
            await decaying.forward_backward_async(to_sdk(NEIGHBOURS[0].datums(0)), "cross_entropy")
            await (await decaying.optim_step_async(adam))

    async def explode() -> None:
        adam = trio.AdamParams(learning_rate=1e30)
        while not stop.is_set():
            trained = await broken.forward_backward_async(to_sdk(NEIGHBOURS[1].datums(0)), "cross_entropy")
            stepped = await broken.optim_step_async(adam)
            await asyncio.gather(trained, stepped, return_exceptions=True)

    async def leave() -> None:
        await (await leaving.forward_backward_async(to_sdk(NEIGHBOURS[2].datums(0)), "cross_entropy"))
        await (await leaving.end_async())

    neighbours = asyncio.gather(decay(), explode(), leave())
    said = await train(MINE, mine, UPDATES)
    stop.set()
    await neighbours
    compare(MINE, oracle, said)
    assert oracle.difference(await weights(service, mine, "end")) <= TOLERANCE
    failed = await broken.forward_backward_async(to_sdk(NEIGHBOURS[1].datums(0)), "cross_entropy")
    assert isinstance(await _error(failed), trio.NonFiniteGradient)
    for job in (mine, decaying, broken):
        await (await job.end_async())


async def _error(future: trio.APIFuture) -> BaseException | None:  # type: ignore[type-arg]
    try:
        await future
    except Exception as error:
        return error
    return None
