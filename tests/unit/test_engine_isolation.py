"""A neighbour's weight decay, divergence, bad data or end changes nothing of mine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mainspring_broker import errors
from mainspring_broker.wire import End, ForwardBackward, Init, Jagged
from tests.oracle import MINE, NEIGHBOURS, oracle_for
from tests.tiny import Driver, batch, jagged, optim, random_datums, tiny_base

INIT = Init(rank=8, seed=1)
LENGTHS = (7, 12, 7)


def ordinary(update: int) -> ForwardBackward:
    return batch(random_datums(100 + update, LENGTHS))


def other_data(update: int) -> ForwardBackward:
    return batch(random_datums(777 + update, LENGTHS))


def nothing(driver: Driver, update: int) -> None:
    pass


def weights_become_nan(driver: Driver, update: int) -> None:
    if update == 1:
        driver.adapter("n").weights.fill_(math.nan)


def moments_become_infinite(driver: Driver, update: int) -> None:
    driver.adapter("n").exp_avg.fill_(math.inf)


def my_bits(
    meddle: Callable[[Driver, int], None] = nothing,
    neighbour: Callable[[int], ForwardBackward] = ordinary,
    decay: float = 0.0,
) -> torch.Tensor:
    """My rows after 4 updates beside a neighbour of the same shape, whom `meddle` may harm before each."""
    driver = Driver(tiny_base())
    driver.run(("mine", INIT), ("n", Init(rank=8, seed=9)))
    for update in range(4):
        meddle(driver, update)
        outcomes = driver.run(
            ("mine", batch(random_datums(update, LENGTHS))),
            ("n", neighbour(update)),
            ("mine", optim()),
            ("n", optim(weight_decay=decay)),
        )
        assert outcomes[0].error is None
        assert outcomes[2].error is None
    return driver.adapter("mine").rows.clone()


@pytest.mark.parametrize(
    "changes",
    [
        {"decay": 0.9},
        {"neighbour": other_data},
        {"meddle": weights_become_nan},
        {"meddle": moments_become_infinite},
    ],
)
def test_what_happens_to_a_neighbour_changes_no_bit_of_mine(changes: dict[str, Any]) -> None:
    assert my_bits(**changes).equal(my_bits())


def test_a_diverged_neighbour_is_told_so_itself() -> None:
    driver = Driver(tiny_base())
    driver.good(("mine", INIT), ("n", Init(rank=8, seed=9)))
    driver.adapter("n").weights.fill_(math.nan)
    mine, theirs, my_step, their_step = driver.run(
        ("mine", ordinary(0)), ("n", ordinary(1)), ("mine", optim()), ("n", optim())
    )
    assert mine.error is None
    assert my_step.error is None
    assert isinstance(theirs.error, errors.NonFiniteGradient)
    assert isinstance(their_step.error, errors.PrecedingRequestFailed)


def test_a_neighbours_end_changes_no_bit_of_mine_and_its_slot_is_wiped() -> None:
    rows = []
    for ends in (False, True):
        driver = Driver(tiny_base(), slots=2)
        driver.good(("mine", INIT), ("n", Init(rank=8, seed=9)))
        driver.good(("mine", ordinary(0)), ("n", ordinary(1)))
        theirs = driver.adapter("n")
        if ends:
            driver.good(("n", End()))
            assert not theirs.rows.any()
            driver.good(("n2", Init(rank=8, seed=3)))
        driver.good(("mine", optim()))
        rows.append(driver.adapter("mine").rows.clone())
    assert rows[0].equal(rows[1])


def bad_value(name: str, flat: int, value: float) -> ForwardBackward:
    op = batch(random_datums(5, (6, 6)))
    old = op.tokens if name == "tokens" else op.inputs[name]
    values: NDArray[np.generic] = old.values.copy()
    values[flat] = value
    changed = Jagged(values, old.lengths)
    return replace(op, tokens=changed) if name == "tokens" else replace(op, inputs={**op.inputs, name: changed})


BAD: dict[str, tuple[Callable[[], ForwardBackward], type[errors.MainspringError]]] = {
    "token out of range": (lambda: bad_value("tokens", 3, 10**6), errors.TokenOutOfRange),
    "target out of range": (lambda: bad_value("target_tokens", 8, -7), errors.TokenOutOfRange),
    "NaN weight": (lambda: bad_value("weights", 8, math.nan), errors.NonFiniteInput),
    "empty": (lambda: batch([]), errors.EmptyBatch),
    "empty datum": (lambda: batch(random_datums(0, [3, 0])), errors.EmptyDatum),
    "too long": (lambda: batch(random_datums(0, [300])), errors.SequenceTooLong),
    "length mismatch": (
        lambda: replace(
            batch(random_datums(0, [3])),
            inputs={"target_tokens": jagged([np.zeros(2, np.int32)])},
        ),
        errors.LengthMismatch,
    ),
    "unknown loss": (lambda: replace(batch(random_datums(0, [3])), loss_fn="no"), errors.UnknownLoss),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_fails_alone_while_seven_neighbours_equal_the_oracle(name: str) -> None:
    make, kind = BAD[name]
    jobs = [MINE, *NEIGHBOURS[:6]]
    driver = Driver(tiny_base())
    driver.good(("bad", INIT), *[(job.name, job.init) for job in jobs])
    oracles = [oracle_for(driver, job) for job in jobs]
    before = driver.adapter("bad").rows.clone()
    for update in range(2):
        requests = [r for job in jobs for r in ((job.name, batch(job.datums(update))), (job.name, job.step))]
        refused, step, *others = driver.run(("bad", make()), ("bad", optim()), *requests)
        assert type(refused.error) is kind
        assert isinstance(step.error, errors.PrecedingRequestFailed)
        assert all(outcome.error is None for outcome in others)
        for job, oracle in zip(jobs, oracles, strict=True):
            oracle.forward_backward(job.datums(update))
            oracle.optim_step(job.step)
    assert driver.adapter("bad").rows.equal(before)
    for job, oracle in zip(jobs, oracles, strict=True):
        assert oracle.difference(driver.matrices(job.name)) <= 1e-5


def test_outputs_are_in_datum_order_whatever_the_packing(tmp_path: Path) -> None:
    lengths = (9, 2, 5, 2, 9, 1)
    reference = Driver(tiny_base())
    reference.good(("mine", INIT))
    datums = random_datums(4, lengths)
    singles = [reference.good(("mine", batch([datum], backward=False)))[0] for datum in datums]
    expected = np.concatenate([single["logprobs"] for single in singles])
    for micro_batch_tokens in (1, 7, 12, 1000):
        driver = Driver(tiny_base(), tmp_path, micro_batch_tokens=micro_batch_tokens)
        driver.good(("a", Init(rank=4, seed=2)), ("mine", INIT), ("z", Init(rank=8, seed=3)))
        neighbours = [("z", batch(random_datums(1, [9, 9]))), ("a", batch(random_datums(2, [2, 3])))]
        _, mine, _ = driver.good(neighbours[0], ("mine", batch(datums)), neighbours[1])
        np.testing.assert_allclose(mine["logprobs"], expected, atol=1e-5)
        assert mine["lengths"].tolist() == list(lengths)
