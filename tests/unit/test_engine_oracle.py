"""The fused engine trains each job to the weights that a plain PEFT loop gives it, whoever else is in the cycle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from mainspring_broker import base_models
from mainspring_broker.wire import Init, OptimStep
from mainspring_workers.base_model import BaseModel
from tests.oracle import Oracle
from tests.tiny import (
    FAMILIES,
    Datum,
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


@dataclass(frozen=True)
class Job:
    """What one job does in each of its updates."""

    name: str
    init: Init
    lengths: tuple[int, ...]
    step: OptimStep = field(default_factory=optim)

    def datums(self, update: int) -> list[Datum]:
        return random_datums(1000 * self.init.seed + update, self.lengths)


MINE = Job("mine", Init(rank=8, seed=1), (7, 12, 7, 5), optim(weight_decay=0.01))
NEIGHBOURS = [
    Job("n2", Init(rank=4, seed=2), (3,), optim(1e-3)),
    Job("n3", Init(rank=8, seed=3), (20, 11), optim(1e-3, grad_clip_norm=0.5)),
    Job("n4", Init(rank=16, seed=4, train_unembed=False), (1, 2, 3, 4, 5), optim(5e-3, weight_decay=0.5)),
    Job("n5", Init(rank=1, seed=5, train_mlp=False), (7, 7), optim(1e-3, beta1=0.5, beta2=0.9)),
    Job("n6", Init(rank=12, seed=6, train_attn=False), (30,), optim(1e-3, eps=1e-4)),
    Job("n7", Init(rank=8, seed=7), (7, 12, 7, 5), optim(1e-4)),
    Job("n8", Init(rank=8, seed=8, train_attn=False, train_mlp=False), (9, 9, 2), optim(3e-3)),
]


def oracle_for(driver: Driver, job: Job, family: str = "llama") -> Oracle:
    return Oracle(tiny_model(family), peft_targets(family, job.init), driver.matrices(job.name), job.init)


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
            np.testing.assert_allclose(results[2 * i]["logprobs"], np.concatenate(logprobs), atol=2e-5)
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
        moved = max(
            float((a - b).abs().max()) for n in before[job.name] for a, b in _pairs(driver, before, job.name, n)
        )
        assert moved > 1e-3
        assert oracle.difference(driver.matrices(job.name)) <= 1e-4 * moved + 1e-6


def _pairs(driver: Driver, before: dict, job: str, name: str):  # type: ignore[no-untyped-def, type-arg]
    return zip(driver.matrices(job)[name], before[job][name], strict=True)


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
