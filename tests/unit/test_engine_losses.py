"""Jobs with different losses and settings train in one pass, each to the weights that plain autograd gives it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mainspring import custom_loss, encoding
from mainspring import types as sdk
from mainspring_broker import errors
from mainspring_broker.wire import ForwardBackward, Init
from tests.oracle import MINE, NEIGHBOURS, Job, Oracle, oracle_for
from tests.tiny import Datum, Driver, batch, linear_probe, optim, random_datums, random_episodes, tiny_base

UPDATES = 10
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True)
class LossJob(Job):
    """A job with a loss of its own. eps is large against rounding errors: see tests/integration/training.py."""

    loss_fn: str = "cross_entropy"
    config: dict[str, float] | None = None

    def datums(self, update: int) -> list[Datum]:
        make = random_datums if self.loss_fn == "cross_entropy" else random_episodes
        return make(1000 * self.init.seed + update, self.lengths)

    def request(self, update: int, *, backward: bool = True) -> ForwardBackward:
        return batch(self.datums(update), self.loss_fn, self.config, backward=backward)


def with_loss(job: Job, loss_fn: str, config: dict[str, float] | None = None) -> LossJob:
    step = replace(job.step, eps=1e-3, learning_rate=min(job.step.learning_rate, 1e-3))
    return LossJob(job.name, job.init, job.lengths, step, loss_fn, config)


LOSSES: list[tuple[str, dict[str, float] | None]] = [
    ("importance_sampling", None),
    ("ppo", None),
    ("cispo", None),
    ("dro", None),
    ("ppo", {LOW: 0.2, HIGH: 3.0}),
    ("cispo", {LOW: 0.9, HIGH: 1.1}),
    ("dro", {"beta": 0.5}),
    ("cross_entropy", None),
]


def train(driver: Driver, jobs: Sequence[LossJob], oracles: Sequence[Oracle], updates: int = UPDATES) -> None:
    for update in range(updates):
        results = driver.good(*[r for job in jobs for r in ((job.name, job.request(update)), (job.name, job.step))])
        for job, oracle, result, stepped in zip(jobs, oracles, results[::2], results[1::2], strict=True):
            loss, logprobs = oracle.forward_backward(job.datums(update), job.loss_fn, job.config)
            assert result["metrics"]["loss_sum"] == pytest.approx(loss, rel=1e-5, abs=1e-5)
            np.testing.assert_allclose(result["logprobs"], np.concatenate(logprobs), atol=2e-5)
            assert stepped["metrics"]["grad_norm"] == pytest.approx(oracle.optim_step(job.step), rel=1e-4)


@pytest.mark.parametrize(("loss_fn", "config"), LOSSES)
def test_ten_updates_alone_give_the_oracles_weights(loss_fn: str, config: dict[str, float] | None) -> None:
    job = with_loss(MINE, loss_fn, config)
    driver = Driver(tiny_base())
    driver.good((job.name, job.init))
    oracle = oracle_for(driver, job)
    train(driver, [job], [oracle])
    assert oracle.difference(driver.matrices(job.name)) <= 1e-5


@pytest.mark.parametrize("micro_batch_tokens", [1024, 24])
def test_ten_updates_of_eight_losses_in_one_pass(micro_batch_tokens: int) -> None:
    jobs = [with_loss(job, *loss) for job, loss in zip([MINE, *NEIGHBOURS], LOSSES, strict=True)]
    driver = Driver(tiny_base(), micro_batch_tokens=micro_batch_tokens)
    driver.good(*[(job.name, job.init) for job in jobs])
    oracles = [oracle_for(driver, job) for job in jobs]
    train(driver, jobs, oracles)
    for job, oracle in zip(jobs, oracles, strict=True):
        assert oracle.difference(driver.matrices(job.name)) <= 1e-5, job.name


def test_one_job_may_mix_losses_in_one_update() -> None:
    driver = Driver(tiny_base())
    driver.good((MINE.name, MINE.init))
    oracle = oracle_for(driver, MINE)
    step = optim(1e-3, eps=1e-3)
    for update in range(3):
        mixed = [replace(with_loss(MINE, *loss), lengths=(5, 3)) for loss in LOSSES]
        driver.good(*[(MINE.name, job.request(update)) for job in mixed], (MINE.name, step))
        for job in mixed:
            oracle.forward_backward(job.datums(update), job.loss_fn, job.config)
        oracle.optim_step(step)
    assert oracle.difference(driver.matrices(MINE.name)) <= 1e-5


@pytest.mark.parametrize(("loss_fn", "config"), LOSSES)
def test_the_gradients_scale_is_right(loss_fn: str, config: dict[str, float] | None) -> None:
    job = with_loss(MINE, loss_fn, config)
    driver = Driver(tiny_base())
    driver.good((job.name, job.init), ("n", Init(rank=4, seed=2)))
    driver.good((job.name, job.request(0)), (job.name, optim(0.05)))  # or B and with it half of the gradient would be 0
    before = driver.matrices(job.name)
    oracle = oracle_for(driver, job)
    driver.good((job.name, job.request(1)), (job.name, linear_probe()), ("n", batch(random_datums(1, [6]))))
    oracle.forward_backward(job.datums(1), job.loss_fn, job.config)
    oracle.optim_step(linear_probe())
    after = driver.matrices(job.name)
    moved = max(float((after[n][i] - before[n][i]).abs().max()) for n in after for i in (0, 1))
    assert moved > 1e-3
    assert oracle.difference(after) <= 1e-4 * moved + 1e-6


@pytest.mark.parametrize(("loss_fn", "config"), LOSSES)
def test_forward_says_what_forward_backward_says_and_leaves_no_gradient(
    loss_fn: str, config: dict[str, float] | None
) -> None:
    job = with_loss(MINE, loss_fn, config)
    driver = Driver(tiny_base())
    driver.good((job.name, job.init))
    (without,) = driver.good((job.name, job.request(0, backward=False)))
    assert not driver.adapter(job.name).has_gradient
    assert not driver.adapter(job.name).grad.any()
    (trained,) = driver.good((job.name, job.request(0)))
    np.testing.assert_array_equal(without["logprobs"], trained["logprobs"])
    assert without["metrics"] == trained["metrics"]


def test_without_weights_every_token_counts_once() -> None:
    job = with_loss(MINE, "ppo")
    driver = Driver(tiny_base())
    driver.good((job.name, job.init))
    op = job.request(0)
    bare = replace(op, inputs={name: rows for name, rows in op.inputs.items() if name != "weights"})
    ones = [replace(datum, weights=np.ones_like(datum.weights)) for datum in job.datums(0)]
    given, left_out = driver.good((job.name, batch(ones, "ppo", backward=False)), (job.name, bare))
    assert given["metrics"] == left_out["metrics"]
    assert given["metrics"]["token_count"] == int((op.inputs["target_tokens"].values != -100).sum())


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "config", "kind", "words"),
    [
        ("ppo", {"epsilon": 0.2}, errors.InvalidLossConfig, "'epsilon'; allowed: clip_high_threshold, clip_low_thr"),
        ("ppo", {LOW: -0.1}, errors.InvalidLossConfig, LOW),
        ("cispo", {HIGH: math.inf}, errors.InvalidLossConfig, HIGH),
        ("ppo", {LOW: 1.3}, errors.InvalidLossConfig, "is 1.3, above clip_high_threshold, which is 1.2"),
        ("dro", {"beta": "0.1"}, errors.InvalidLossConfig, "beta"),
        ("importance_sampling", {LOW: 0.8}, errors.InvalidLossConfig, "allowed: none"),
    ],
)
def test_bad_settings_are_refused_by_name(
    loss_fn: str, config: dict[str, Any], kind: type[Exception], words: str
) -> None:
    driver = Driver(tiny_base())
    driver.good((MINE.name, MINE.init))
    (outcome,) = driver.run((MINE.name, with_loss(MINE, loss_fn, config).request(0)))
    assert type(outcome.error) is kind
    assert words in str(outcome.error)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro"])
@pytest.mark.parametrize("missing", ["logprobs", "advantages", "target_tokens"])
def test_a_missing_input_is_refused_by_name(loss_fn: str, missing: str) -> None:
    driver = Driver(tiny_base())
    driver.good((MINE.name, MINE.init))
    op = with_loss(MINE, loss_fn).request(0)
    op = replace(op, inputs={name: rows for name, rows in op.inputs.items() if name != missing})
    (outcome,) = driver.run((MINE.name, op))
    assert isinstance(outcome.error, errors.MissingLossInput)
    assert outcome.error.details["field"] == missing


def test_a_loss_that_overflows_fails_alone_and_says_where() -> None:
    jobs = [with_loss(job, "importance_sampling") for job in (MINE, NEIGHBOURS[0])]
    driver = Driver(tiny_base())
    driver.good(*[(job.name, job.init) for job in jobs])
    oracle = oracle_for(driver, jobs[0])
    bad = jobs[1].datums(0)
    bad[0].extra["logprobs"][:] = -500
    bad[0].extra["advantages"][:] = 1
    bad = [*random_episodes(1, [4]), bad[0]]
    mine, theirs, my_step, their_step = driver.run(
        (jobs[0].name, jobs[0].request(0)),
        (jobs[1].name, batch(bad, "importance_sampling")),
        *[(job.name, job.step) for job in jobs],
    )
    assert isinstance(theirs.error, errors.NonFiniteGradient)
    assert "datum 1 overflows float32" in str(theirs.error)
    assert isinstance(their_step.error, errors.PrecedingRequestFailed)
    assert mine.error is None
    assert my_step.error is None
    oracle.forward_backward(jobs[0].datums(0), "importance_sampling")
    oracle.optim_step(jobs[0].step)
    assert oracle.difference(driver.matrices(jobs[0].name)) <= 1e-6


# -- custom losses ----------------------------------------------------------------------------------------------------


def to_sdk(datums: Sequence[Datum]) -> list[sdk.Datum]:
    return [
        sdk.Datum(sdk.ModelInput(d.tokens), {"target_tokens": d.targets, "weights": d.weights, **d.extra})
        for d in datums
    ]


def linearized(driver: Driver, job: Job, datums: Sequence[Datum], loss_fn: custom_loss.LossFunction) -> Any:
    """What the client makes of a custom loss, with the engine in place of the service."""
    data = to_sdk(datums)
    scoring = encoding.flatten(custom_loss.to_score(data), "cross_entropy", {}, backward=False)
    (scored,) = driver.good((job.name, scoring))
    linear = custom_loss.linearize(data, encoding.join_outputs([scored]), loss_fn)
    return linear, encoding.flatten(linear.batch, "cross_entropy", {}, backward=True)


def dpo(reference: Sequence[Tensor], beta: float = 0.1) -> Any:
    """Datums 2i and 2i + 1 are a chosen and a rejected answer."""

    def loss(logprobs: Sequence[Tensor]) -> Tensor:
        gains = torch.stack([now.sum() - before.sum() for now, before in zip(logprobs, reference, strict=True)])
        return -F.logsigmoid(beta * (gains[0::2] - gains[1::2])).sum()

    return loss


PAIRS = Job("pairs", Init(rank=8, seed=1), (7, 9, 5, 6, 8, 8, 3, 4), optim(1e-3, eps=1e-3))


def train_dpo(driver: Driver, oracle: Oracle, neighbours: Sequence[LossJob]) -> list[float]:
    """10 updates of DPO with the oracle beside them; the losses."""
    datums = PAIRS.datums(0)
    (start,) = driver.good((PAIRS.name, batch(datums, backward=False)))
    ends = np.cumsum([len(d.tokens) for d in datums])[:-1].tolist()
    loss = dpo([torch.from_numpy(row) for row in np.split(start["logprobs"], ends)])
    losses = []
    for update in range(UPDATES):
        linear, op = linearized(driver, PAIRS, datums, lambda _, logprobs: (loss(logprobs), {}))
        others = [request for job in neighbours for request in ((job.name, job.request(update)), (job.name, job.step))]
        driver.good(*others[:6], (PAIRS.name, op), (PAIRS.name, PAIRS.step), *others[6:])
        assert linear.loss == pytest.approx(oracle.custom(datums, loss), abs=1e-5)
        oracle.optim_step(PAIRS.step)
        losses.append(linear.loss)
    return losses


@pytest.mark.parametrize("crowded", [False, True])
def test_dpo_starts_at_ln_2_a_pair_and_gives_the_oracles_weights(crowded: bool) -> None:
    neighbours = [with_loss(job, *loss) for job, loss in zip(NEIGHBOURS, LOSSES, strict=False)] if crowded else []
    driver = Driver(tiny_base())
    driver.good((PAIRS.name, PAIRS.init), *[(job.name, job.init) for job in neighbours])
    oracle = oracle_for(driver, PAIRS)
    losses = train_dpo(driver, oracle, neighbours)
    assert losses[0] == pytest.approx(4 * math.log(2), abs=1e-5)
    assert losses[-1] < losses[0] - 0.01
    assert oracle.difference(driver.matrices(PAIRS.name)) <= 1e-5


def test_a_custom_cross_entropy_is_the_built_in_one_to_the_last_bit() -> None:
    def loss(data: Sequence[sdk.Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        weights = [datum.loss_fn_inputs["weights"].torch() for datum in data]
        return -sum((w * p).sum() for w, p in zip(weights, logprobs, strict=True)), {}

    rows = []
    for custom in (False, True):
        driver = Driver(tiny_base())
        driver.good((MINE.name, MINE.init))
        for update in range(3):
            op = batch(MINE.datums(update))
            if custom:
                _, op = linearized(driver, MINE, MINE.datums(update), loss)
                plain = batch(MINE.datums(update)).inputs["weights"].values
                np.testing.assert_array_equal(op.inputs["weights"].values, plain)
            driver.good((MINE.name, op), (MINE.name, MINE.step))
        rows.append(driver.adapter(MINE.name).rows.clone())
    assert rows[0].equal(rows[1])
