"""The fused engine trains each job to the weights that a plain PEFT loop gives it, whoever else is in the cycle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mainspring_broker import base_models
from mainspring_broker.wire import Init
from mainspring_workers.base_model import BaseModel
from tests.oracle import MINE, NEIGHBOURS, Job, Oracle, oracle_for
from tests.tiny import (
    FAMILIES,
    Driver,
    batch,
    linear_probe,
    optim,
    peft_targets,
    random_datums,
    tiny_base,
    tiny_model,
)

UPDATES = 20


def train(driver: Driver, jobs: Sequence[Job], oracles: Sequence[Oracle], updates: int = UPDATES) -> None:
    """Train all jobs in the same batches, and each oracle beside its job; losses and norms are compared on the way."""
    for update in range(updates):
        results = driver.good(
            *[request for job in jobs for request in ((job.name, batch(job.datums(update))), (job.name, job.step))]
        )
        for i, (job, oracle) in enumerate(zip(jobs, oracles, strict=False)):
            loss, logprobs = oracle.forward_backward(job.datums(update))
            norm = oracle.optim_step(job.step)
            assert results[2 * i]["metrics"]["loss_sum"] == pytest.approx(loss, rel=1e-4, abs=1e-4)
            np.testing.assert_allclose(results[2 * i]["logprobs"], np.concatenate(logprobs), atol=5e-5)
            assert results[2 * i + 1]["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_updates_alone_give_the_oracles_weights(family: str) -> None:
    driver = Driver(tiny_base(family))
    driver.good((MINE.name, MINE.init))
    oracle = oracle_for(driver, MINE, family)
    train(driver, [MINE], [oracle])
    assert oracle.difference(driver.matrices(MINE.name)) <= 1e-5


@pytest.mark.parametrize("micro_batch_tokens", [1024, 24])
def test_twenty_updates_among_seven_unlike_neighbours(micro_batch_tokens: int) -> None:
    driver = Driver(tiny_base(), micro_batch_tokens=micro_batch_tokens)
    jobs = [MINE, *NEIGHBOURS]
    driver.good(*[(job.name, job.init) for job in jobs])
    oracles = [oracle_for(driver, job) for job in jobs]
    train(driver, jobs, oracles)
    for job, oracle in zip(jobs, oracles, strict=True):
        assert oracle.difference(driver.matrices(job.name)) <= 1e-5, job.name


def test_deterministic_isolation_gives_the_same_bits_alone_and_among_neighbours() -> None:
    weights = []
    for jobs in ([MINE], [MINE, *NEIGHBOURS]):
        driver = Driver(tiny_base(), deterministic_isolation=True)
        driver.good(*[(job.name, job.init) for job in jobs])
        train(driver, jobs, [], updates=5)
        weights.append(driver.adapter(MINE.name).weights.clone())
    assert weights[0].equal(weights[1])


@pytest.mark.parametrize("one_run_each", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 6])
def test_one_update_as_several_requests_and_batches(parts: int, one_run_each: bool) -> None:
    job = Job("mine", Init(rank=8, seed=1), (7, 12, 7, 5, 3, 7))
    driver = Driver(tiny_base())
    driver.good((job.name, job.init), ("other", Init(rank=8, seed=2)))
    oracle = oracle_for(driver, job)
    for update in range(UPDATES):
        datums = job.datums(update)
        pieces = [piece.tolist() for piece in np.array_split(np.arange(6), parts)]
        requests = [(job.name, batch([datums[i] for i in piece])) for piece in pieces]
        neighbour = ("other", batch(random_datums(update, [9])))
        if one_run_each:
            for request in requests:
                driver.good(request, neighbour)
            (result,) = driver.good((job.name, job.step))
        else:
            *_, result = driver.good(neighbour, *requests, (job.name, job.step))
        oracle.forward_backward(datums)
        assert result["metrics"]["grad_norm"] == pytest.approx(oracle.optim_step(job.step), rel=1e-4)
    assert oracle.difference(driver.matrices(job.name)) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradients_scale_is_right(family: str) -> None:
    jobs = [MINE, *NEIGHBOURS]
    driver = Driver(tiny_base(family), micro_batch_tokens=40)
    driver.good(*[(job.name, job.init) for job in jobs])
    for job in jobs:  # two ordinary steps, or B and with it half of the gradient would be zero
        driver.good((job.name, batch(job.datums(0))), (job.name, optim(0.1)))
    before = {job.name: driver.matrices(job.name) for job in jobs}
    oracles = [oracle_for(driver, job, family) for job in jobs]
    probe = linear_probe()
    requests = [request for job in jobs for request in ((job.name, batch(job.datums(1))), (job.name, probe))]
    driver.good(*requests)
    for job, oracle in zip(jobs, oracles, strict=True):
        oracle.forward_backward(job.datums(1))
        oracle.optim_step(probe)
        after = driver.matrices(job.name)
        moved = max(float((after[name][i] - before[job.name][name][i]).abs().max()) for name in after for i in (0, 1))
        assert moved > 1e-3
        assert oracle.difference(driver.matrices(job.name)) <= 1e-4 * moved + 1e-6


def test_tied_embeddings_with_lora_on_the_head() -> None:
    driver = Driver(tiny_base(tied=True))
    driver.good((MINE.name, MINE.init))
    with pytest.warns(UserWarning, match="tie"):
        oracle = Oracle(tiny_model(tied=True), peft_targets("llama", MINE.init), driver.matrices(MINE.name), MINE.init)
    train(driver, [MINE], [oracle])
    assert oracle.difference(driver.matrices(MINE.name)) <= 1e-5


def test_sliding_window_attention() -> None:
    changes = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    driver = Driver(tiny_base("qwen2", **changes))
    driver.good((MINE.name, MINE.init))
    oracle = Oracle(
        tiny_model("qwen2", **changes), peft_targets("qwen2", MINE.init), driver.matrices(MINE.name), MINE.init
    )
    train(driver, [MINE], [oracle], updates=3)
    assert oracle.difference(driver.matrices(MINE.name)) <= 1e-5


def test_forward_reports_what_forward_backward_reports_and_leaves_no_gradient() -> None:
    driver = Driver(tiny_base())
    driver.good(("mine", MINE.init))
    datums = MINE.datums(0)
    with_gradient, without = driver.good(("mine", batch(datums)), ("mine", batch(datums, backward=False)))
    np.testing.assert_array_equal(with_gradient["logprobs"], without["logprobs"])
    assert with_gradient["metrics"] == without["metrics"]
    driver.adapter("mine").clear_gradient()
    driver.good(("mine", batch(datums, backward=False)))
    assert not driver.adapter("mine").has_gradient


def test_metrics_are_sums_over_the_positions_that_count() -> None:
    driver = Driver(tiny_base())
    driver.good(("mine", MINE.init))
    datums = MINE.datums(3)
    (result,) = driver.good(("mine", batch(datums)))
    targets = np.concatenate([d.targets for d in datums])
    weights = np.concatenate([d.weights for d in datums])
    counted = int(((targets != -100) & (weights != 0)).sum())
    loss = -float((weights * result["logprobs"])[targets != -100].sum())
    assert result["metrics"]["token_count"] == counted
    assert result["metrics"]["loss_sum"] == pytest.approx(loss, rel=1e-6)
    assert result["metrics"]["loss_mean"] == pytest.approx(loss / counted, rel=1e-6)
    assert result["logprobs"].dtype == np.float32
    assert result["lengths"].tolist() == [7, 12, 7, 5]
    assert (result["logprobs"][targets == -100] == 0).all()
    assert (result["logprobs"][targets != -100] < 0).all()


def test_the_shipped_model() -> None:
    path = Path(base_models.resolve("mainspring-tiny"))
    if not (path / "config.json").exists():
        pytest.skip("no shipped model here")
    base = BaseModel.load("mainspring-tiny")
    driver = Driver(base)
    jobs = [MINE, *NEIGHBOURS[:3]]
    driver.good(*[(job.name, job.init) for job in jobs])
    for update in range(3):
        datums = [random_datums(10 * i + update, [24, 24], base.vocab_size) for i in range(len(jobs))]
        pairs = zip(jobs, datums, strict=True)
        results = driver.good(*[r for job, d in pairs for r in ((job.name, batch(d)), (job.name, optim()))])
        assert all(math.isfinite(result["metrics"].get("loss_sum", 0.0)) for result in results)
