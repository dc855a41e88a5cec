"""A fused pass that fails is tried again in pieces: only the culprit fails, and nobody's gradient counts twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mainspring_broker import errors
from mainspring_broker.wire import Init
from mainspring_workers.base_model import BaseModel
from tests.tiny import Driver, batch, optim, random_datums, tiny_base

CURSED = 13  # a token that only the culprit uses
JOBS = ("a", "b", "c")


def datums_without_curse(seed: int) -> Any:
    data = random_datums(seed, [6, 6])
    for datum in data:
        datum.tokens[datum.tokens == CURSED] = 12
    return data


def cursed(backward: bool = True) -> Any:
    data = datums_without_curse(50)
    data[1].tokens[2] = CURSED
    return batch(data, backward=backward)


def curse(base: BaseModel, failure: Callable[[], Exception]) -> list[int]:
    """Make every pass with the token CURSED fail; returns a list that grows by the tokens of each pass."""
    passes: list[int] = []
    hidden = base.hidden

    def failing(tokens: Any, *rest: Any) -> Any:
        passes.append(len(tokens))
        out = hidden(tokens, *rest)
        if (tokens == CURSED).any():
            raise failure()
        return out

    base.hidden = failing  # type: ignore[method-assign]
    return passes


FAILURES: dict[str, tuple[Callable[[], Exception], type[errors.MainspringError]]] = {
    "bug": (lambda: ZeroDivisionError("oops"), errors.InternalError),
    "CUDA out of memory": (lambda: torch.OutOfMemoryError("CUDA out of memory"), errors.OutOfMemory),
    "CPU out of memory": (
        lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        errors.OutOfMemory,
    ),
    "memory error": (MemoryError, errors.OutOfMemory),
}


@pytest.mark.parametrize("name", FAILURES)
def test_only_the_culprit_fails(name: str, caplog: pytest.LogCaptureFixture) -> None:
    failure, kind = FAILURES[name]
    base = tiny_base()
    # Micro-batches of one datum: the pass fails in its middle, when others' gradients are already staged.
    driver, clean = Driver(base, micro_batch_tokens=6), Driver(tiny_base(), micro_batch_tokens=6)
    inits = [(job, Init(rank=4, seed=i)) for i, job in enumerate(JOBS)]
    driver.good(*inits)
    clean.good(*inits)
    passes = curse(base, failure)
    requests = [("a", batch(datums_without_curse(1))), ("c", batch(datums_without_curse(2)))]
    with caplog.at_level(logging.WARNING):
        a, bad, c, a_step, b_step, c_step = driver.run(
            requests[0], ("b", cursed()), requests[1], *[(job, optim()) for job in JOBS]
        )
    assert "a pass over 3 requests failed" in caplog.text
    assert type(bad.error) is kind
    assert isinstance(b_step.error, errors.PrecedingRequestFailed)
    assert len(passes) > 3
    results = clean.good(*requests, ("a", optim()), ("c", optim()))
    for outcome, expected in zip((a, c), results[:2], strict=True):
        assert outcome.result is not None
        np.testing.assert_allclose(outcome.result["logprobs"], expected["logprobs"], atol=1e-6)
    assert a_step.error is None
    assert c_step.error is None
    for job in ("a", "c"):
        torch.testing.assert_close(driver.adapter(job).weights, clean.adapter(job).weights, atol=1e-6, rtol=0)
    assert driver.adapter("b").step == 0


def test_of_one_jobs_requests_only_the_culprit_fails() -> None:
    base = tiny_base()
    driver = Driver(base)
    driver.good(("a", Init(rank=4, seed=0)))
    curse(base, lambda: ZeroDivisionError("oops"))
    first, bad, last = driver.run(
        ("a", batch(datums_without_curse(1))), ("a", cursed()), ("a", batch(datums_without_curse(2)))
    )
    assert first.error is None
    assert isinstance(bad.error, errors.InternalError)
    assert last.error is None


def test_a_forward_that_fails_leaves_the_gradients_of_the_batch_alone() -> None:
    base = tiny_base()
    driver = Driver(base)
    driver.good(("a", Init(rank=4, seed=0)))
    curse(base, lambda: ZeroDivisionError("oops"))
    good, forward, step = driver.run(("a", batch(datums_without_curse(1))), ("a", cursed(False)), ("a", optim()))
    assert good.error is None
    assert isinstance(forward.error, errors.InternalError)
    assert step.error is None


def test_after_a_failure_the_base_model_is_plain_again() -> None:
    base = tiny_base()
    driver = Driver(base)
    driver.good(("a", Init(rank=4, seed=0)))
    curse(base, lambda: ZeroDivisionError("oops"))
    driver.run(("a", cursed()))
    assert base.context.work is None
    driver.good(("a", batch(datums_without_curse(1), backward=False)))


def test_gradients_that_alone_are_finite_are_kept_when_a_sibling_request_overflows() -> None:
    driver = Driver(tiny_base())
    driver.good(("a", Init(rank=4, seed=0)), ("n", Init(rank=4, seed=1)))
    huge = random_datums(3, [6])
    huge[0].weights[:] = 3e38  # finite in float32; its gradient is not
    good, bad, neighbour = driver.run(
        ("a", batch(datums_without_curse(1))), ("a", batch(huge)), ("n", batch(datums_without_curse(2)))
    )
    assert good.error is None
    assert isinstance(bad.error, errors.NonFiniteGradient)
    assert neighbour.error is None
    assert bool(torch.isfinite(driver.adapter("a").grad).all())
    outcomes = driver.run(("a", optim()), ("n", optim()))
    assert isinstance(outcomes[0].error, errors.PrecedingRequestFailed)
    assert outcomes[1].error is None
