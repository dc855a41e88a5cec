"""Checkpoints through the whole service: into other jobs, over the death of the worker, and not into other tenants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

import mainspring as trio
from mainspring_broker import keys
from mainspring_workers.checkpoints import Checkpoints
from mainspring_workers.storage import open_storage
from tests.helpers import wait_until
from tests.integration.training import BASE_MODEL, MINE, to_sdk, train, weights
from tests.service import Service, running_service

# Python runs this when a process starts: a worker that has renamed the finished folder `fatal` dies before its commit.
DYING = """
import os, signal
rename = os.rename
def rename_and_die(source, target, **options):
    rename(source, target, **options)
    if os.fspath(target).endswith("/fatal"):
        os.kill(os.getpid(), signal.SIGKILL)
os.rename = rename_and_die
"""

Weights = dict[str, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(DYING)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(site))
        with running_service(tmp_path_factory.mktemp("pool"), tenants="default,other") as running:
            yield running


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[trio.ServiceClient]:
    with trio.ServiceClient(service.url) as connected:
        yield connected


async def one_update(client: trio.TrainingClient, number: int) -> None:
    await client.forward_backward_async(to_sdk(MINE.datums(number)), "cross_entropy")
    await (await client.optim_step_async(MINE.adam))


def difference(ours: Weights, theirs: Weights) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((a - b).abs().max()) for n in ours for a, b in zip(ours[n], theirs[n], strict=True))


async def test_training_goes_on_in_another_job_and_over_the_death_of_the_worker(
    service: Service, client: trio.ServiceClient
) -> None:
    live = await MINE.create(client, "live")
    await train(MINE, live, 5)
    saved = await (await live.save_state_async("five"))
    assert saved.path == f"mainspring://{live.job}/weights/five"
    assert Path(saved.location) == service.storage / "default" / live.job / "weights" / "five"
    await one_update(live, 5)
    expected = await weights(service, live, "end")

    def resumed(job: str) -> trio.TrainingClient:
        again = client.create_training_client_from_state_with_optimizer(saved.path, job=job)
        assert (again.job, again.base_model, again.rank, again.seed) == (job, BASE_MODEL, MINE.rank, MINE.seed)
        assert (again.train_attn, again.train_mlp, again.train_unembed) == (True, True, True)
        return again

    async with resumed("resumed") as again:
        await one_update(again, 5)
        assert difference(await weights(service, again, "end"), expected) <= 1e-6

    async with await client.create_training_client_from_state_async(saved.path) as fresh:
        await one_update(fresh, 5)
        assert difference(await weights(service, fresh, "end"), expected) > 1e-4

    async with await MINE.create(client, "there") as there:
        await one_update(there, 9)
        loaded = await (await there.load_state_with_optimizer_async(saved.path))
        assert loaded == trio.LoadWeightsResponse(saved.path, step=5)
        await one_update(there, 5)
        assert difference(await weights(service, there, "end"), expected) <= 1e-6

    # The worker has written the checkpoint and dies; the next one is asked for it again, and finds it.
    fatal = await live.save_state_async("fatal")
    worker = service.processes.pop("worker-0")
    assert worker.wait(30) == -9
    checkpoints = Checkpoints(open_storage(str(service.storage)))
    listed = {place.path: place for place, _ in checkpoints.list_checkpoints("default", live.job)}
    assert set(listed) == {
        f"mainspring://{live.job}/{place}" for place in ("weights/five", "weights/fatal", "sampler_weights/end")
    }
    service.start("worker", "worker-0")
    path = (await fatal).path
    assert difference(dict(checkpoints.load(listed[path], optimizer=True).weights), expected) == 0
    with pytest.raises(trio.StateLost):
        await (await live.save_state_async("after"))
    await live.close_async()

    async with resumed("resumed-elsewhere") as again:
        await one_update(again, 5)
        assert difference(await weights(service, again, "end"), expected) <= 1e-6


async def test_what_cannot_be_loaded_is_an_error_of_the_call_and_leaves_no_job(
    service: Service, client: trio.ServiceClient
) -> None:
    async with await MINE.create(client, "mine") as mine:
        saved = await (await mine.save_weights_for_sampler_async("only", ttl_seconds=3600))
        with pytest.raises(trio.CheckpointExists):
            await (await mine.save_weights_for_sampler_async("only"))
        with pytest.raises(trio.NoOptimizerState, match="has no optimizer state"):
            client.create_training_client_from_state_with_optimizer(saved.path, job="a")
        with pytest.raises(trio.CheckpointNotFound):
            await client.create_training_client_from_state_async(saved.path + "x", job="b")
        with pytest.raises(trio.PayloadInvalid):
            client.create_training_client_from_state("default/" + saved.path, job="c")
        with pytest.raises(trio.PayloadInvalid):
            await (await mine.load_state_async("mainspring://mine/weights/../x"))
        small = await client.create_lora_training_client_async(BASE_MODEL, rank=2, train_mlp=False)
        async with small:
            with pytest.raises(trio.CheckpointMismatch, match=r"rank is 8 there and 2 here, train_mlp is True there"):
                await (await small.load_state_async(saved.path))
            await one_update(small, 1)
        with trio.ServiceClient(service.url, tenant="other") as other:
            with pytest.raises(trio.CheckpointNotFound):
                other.create_training_client_from_state(saved.path, job=mine.job)
    jobs = keys.worker_jobs("main", "worker-0")
    wait_until(lambda: not service.redis.smembers(jobs), "every job has given its slot back")


async def test_two_jobs_save_the_same_name_in_one_cycle(service: Service, client: trio.ServiceClient) -> None:
    async with await MINE.create(client, "one") as one, await MINE.create(client, "two") as two:
        futures = [await job.save_state_async("same") for job in (one, two)]
        saved = [await future for future in futures]
        assert [s.path for s in saved] == [f"mainspring://{job.job}/weights/same" for job in (one, two)]
        assert len({s.location for s in saved}) == 2
        states = [(Path(s.location) / "optimizer.safetensors").read_bytes() for s in saved]
        assert states[0] == states[1]
