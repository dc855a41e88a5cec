"""What a failure does to the update it belongs to, and what is left of it afterwards: nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mainspring_broker import errors
from mainspring_broker.wire import End, Init, SaveState, SaveWeights
from mainspring_workers.engine import Outcome, WorkItem
from tests.tiny import Driver, batch, optim, random_datums, tiny_base

GOOD = batch(random_datums(0, [5, 7]))
BAD = replace(GOOD, loss_fn="no such loss")


@pytest.fixture
def driver() -> Driver:
    driver = Driver(tiny_base())
    driver.good(("mine", Init(rank=8, seed=1)), ("other", Init(rank=8, seed=1)))
    return driver


def state(driver: Driver) -> torch.Tensor:
    """Weights, moments and step."""
    adapter = driver.adapter("mine")
    return torch.cat([adapter.weights, adapter.exp_avg, adapter.exp_avg_sq, adapter.step[None]])


def failed(outcome: Outcome, kind: type[errors.MainspringError]) -> errors.MainspringError:
    assert outcome.result is None
    assert type(outcome.error) is kind
    return outcome.error


def starts_clean(driver: Driver) -> None:
    """The next update of `mine` equals the first of `other`, which has the same seed and failed nothing."""
    mine, step, theirs, their_step = driver.good(("mine", GOOD), ("mine", optim()), ("other", GOOD), ("other", optim()))
    assert mine["metrics"] == theirs["metrics"]
    assert step == their_step
    assert driver.adapter("mine").weights.equal(driver.adapter("other").weights)


def test_a_failed_forward_backward_voids_the_whole_update(driver: Driver) -> None:
    before = state(driver)
    first, bad, later, step = driver.run(("mine", GOOD), ("mine", BAD), ("mine", GOOD), ("mine", optim()))
    assert first.error is None
    failed(bad, errors.UnknownLoss)
    assert later.error is None
    assert later.result is not None
    assert later.result["metrics"]["loss_sum"] > 0
    error = failed(step, errors.PrecedingRequestFailed)
    assert error.details == {"seq": bad.seq, "cause": "unknown_loss"}
    assert str(bad.seq) in error.message
    assert state(driver).equal(before)
    starts_clean(driver)


def test_the_first_cause_is_the_one_that_is_named(driver: Driver) -> None:
    bad, _, step = driver.run(("mine", BAD), ("mine", batch([])), ("mine", optim()))
    assert failed(step, errors.PrecedingRequestFailed).details["seq"] == bad.seq


def test_poison_outlives_the_batch(driver: Driver) -> None:
    before = state(driver)
    driver.run(("mine", BAD))
    driver.good(("mine", GOOD))
    (step,) = driver.run(("mine", optim()))
    failed(step, errors.PrecedingRequestFailed)
    assert state(driver).equal(before)
    starts_clean(driver)


def test_a_failed_forward_poisons_nothing(driver: Driver) -> None:
    _, forward, step = driver.run(("mine", GOOD), ("mine", replace(BAD, backward=False)), ("mine", optim()))
    failed(forward, errors.UnknownLoss)
    assert step.error is None


@pytest.mark.parametrize(
    "error", [errors.RequestCancelled("cancelled"), errors.PayloadInvalid("cut off"), errors.TokenCountMismatch("no")]
)
def test_an_undecodable_or_cancelled_forward_backward_poisons(driver: Driver, error: errors.MainspringError) -> None:
    good, bad, step = driver.engine.run(
        [
            driver.item("mine", GOOD),
            driver.item("mine", error, "forward_backward"),
            driver.item("mine", optim()),
        ]
    )
    assert good.error is None
    assert bad.error is error
    assert failed(step, errors.PrecedingRequestFailed).details["cause"] == error.code
    starts_clean(driver)


def test_an_operation_of_an_unknown_name_may_have_been_a_gradient_and_poisons(driver: Driver) -> None:
    error = errors.UnknownOperation("no such operation")
    items = [driver.item("mine", GOOD), driver.item("mine", error, "forward_backward_2"), driver.item("mine", optim())]
    _, bad, step = driver.engine.run(items)
    assert bad.error is error
    failed(step, errors.PrecedingRequestFailed)


def test_an_optim_step_without_a_gradient_changes_nothing(driver: Driver) -> None:
    before = state(driver)
    (step,) = driver.run(("mine", optim()))
    failed(step, errors.NoGradient)
    _, again = driver.run(("mine", replace(GOOD, backward=False)), ("mine", optim()))
    failed(again, errors.NoGradient)
    assert state(driver).equal(before)


def test_the_gradient_is_used_once(driver: Driver) -> None:
    driver.good(("mine", GOOD), ("mine", optim()))
    (step,) = driver.run(("mine", optim()))
    failed(step, errors.NoGradient)


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_a_step_with_bad_settings_clears_the_gradient_too(driver: Driver, value: float) -> None:
    before = state(driver)
    _, step, second = driver.run(("mine", GOOD), ("mine", optim(value)), ("mine", optim()))
    failed(step, errors.InvalidHyperparameter)
    failed(second, errors.NoGradient)
    assert state(driver).equal(before)
    starts_clean(driver)


def test_an_undecodable_step_fails_with_its_own_error_and_clears_gradient_and_poison(driver: Driver) -> None:
    error = errors.PayloadInvalid("cut off")
    items = [driver.item("mine", BAD), driver.item("mine", GOOD), driver.item("mine", error, "optim_step")]
    assert driver.engine.run(items)[-1].error is error
    starts_clean(driver)


def test_requests_of_a_job_that_is_not_here_lose_their_state(tmp_path: Path) -> None:
    driver, job = Driver(tiny_base(), tmp_path), "t/gone"
    outcomes = driver.run((job, GOOD), (job, optim()), (job, SaveWeights("x")), (job, SaveState("x")), (job, End()))
    for outcome in outcomes:
        failed(outcome, errors.StateLost)


def test_a_failed_init_leaves_no_job(driver: Driver) -> None:
    init, forward_backward = driver.run(("new", Init(rank=1000, seed=0)), ("new", GOOD))
    failed(init, errors.InvalidHyperparameter)
    failed(forward_backward, errors.StateLost)
    assert not driver.engine.has("new")


def test_no_slot_is_left() -> None:
    driver = Driver(tiny_base(), slots=1)
    _, second = driver.run(("a", Init(rank=8, seed=1)), ("b", Init(rank=8, seed=1)))
    assert failed(second, errors.OutOfMemory).details["limit"] == 1
    driver.good(("a", End()))
    driver.good(("b", Init(rank=8, seed=1)))


def test_drop_forgets_a_job(driver: Driver) -> None:
    assert driver.engine.has("mine")
    driver.engine.drop("mine")
    driver.engine.drop("never there")
    assert not driver.engine.has("mine")
    (outcome,) = driver.run(("mine", GOOD))
    failed(outcome, errors.StateLost)


def test_an_operation_of_the_wrong_type_is_an_internal_error(driver: Driver) -> None:
    (outcome,) = driver.engine.run([WorkItem("mine", 9, "optim_step", GOOD)])
    failed(outcome, errors.InternalError)


def test_several_updates_of_a_job_in_one_batch_equal_one_batch_each(driver: Driver) -> None:
    for _ in range(2):
        driver.good(("mine", GOOD), ("mine", optim()))
    history = [("other", GOOD), ("other", optim())] * 2
    driver.good(*history)
    assert driver.adapter("mine").rows.equal(driver.adapter("other").rows)


def test_outcomes_keep_the_order_of_the_items(driver: Driver) -> None:
    items = [driver.item(job, op) for op in (GOOD, optim()) for job in ("other", "mine")]
    outcomes = driver.engine.run(items[::-1])
    assert [(o.job, o.seq) for o in outcomes] == [(i.job, i.seq) for i in items[::-1]]
    assert all(outcome.error is None for outcome in outcomes)
    assert driver.engine.run([]) == []


def test_an_end_that_cannot_be_read_frees_the_slot_all_the_same() -> None:
    """For everybody else the job has ended, so nothing else would ever free it."""
    driver = Driver(tiny_base(), slots=1)
    driver.good(("a", Init(rank=2, seed=1)))
    (outcome,) = driver.engine.run([driver.item("a", errors.PayloadInvalid("not msgpack"), "end")])
    assert isinstance(outcome.error, errors.PayloadInvalid)
    driver.good(("b", Init(rank=2, seed=1)))
