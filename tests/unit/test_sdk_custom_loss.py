"""forward_backward_custom: a loss that runs in the client, and what goes to the service for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mainspring as trio
from mainspring import custom_loss

ADAM = trio.AdamParams(learning_rate=1e-3)
BATCH = [
    trio.Datum(trio.ModelInput.from_ints(ids), {"target_tokens": [*ids[1:], 9], "mask": [0.0] + [1.0] * (len(ids) - 1)})
    for ids in ([1, 2, 3], [4, 5], [6, 7, 8, 9])
]
Loss = tuple[Tensor, dict[str, float]]


@pytest.fixture
def client() -> Iterator[trio.TrainingClient]:
    with trio.ServiceClient("mock://") as service:
        yield service.create_lora_training_client("mainspring-tiny", rank=8, seed=1)


@pytest.fixture
def sent(client: trio.TrainingClient, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[trio.Datum]]]:
    """What goes to the service: operation and batch."""
    calls: list[tuple[str, list[trio.Datum]]] = []
    compute = client._compute

    def note(data: Any, *args: Any, backward: bool) -> Any:
        calls.append(("forward_backward" if backward else "forward", list(data)))
        return compute(data, *args, backward=backward)

    monkeypatch.setattr(client, "_compute", note)
    return calls


def masked(data: Sequence[trio.Datum], logprobs: Sequence[Tensor]) -> Loss:
    """Couples everything: the square of a sum over the whole batch."""
    total = sum((d.loss_fn_inputs["mask"].torch() * p).sum() for d, p in zip(data, logprobs, strict=True))
    assert isinstance(total, Tensor)
    return total**2 / 2, {"total": total.item(), "datums": len(data)}


def test_the_service_gets_minus_the_gradient_as_weights(
    client: trio.TrainingClient, sent: list[tuple[str, list[trio.Datum]]]
) -> None:
    output = client.forward_backward_custom(BATCH, masked).result(10)
    (scoring, scored), (training, trained) = sent
    assert (scoring, training) == ("forward", "forward_backward")
    assert all(datum.loss_fn_inputs.keys() == {"target_tokens"} for datum in scored)
    logprobs = [row["logprobs"].array for row in output.loss_fn_outputs]
    total = sum(float(row[1:].sum()) for row in logprobs)
    for datum, weights in zip(BATCH, [datum.loss_fn_inputs["weights"].array for datum in trained], strict=True):
        np.testing.assert_allclose(weights, -total * datum.loss_fn_inputs["mask"].array, rtol=1e-6)
        assert weights.dtype == np.float32
    assert output.metrics == {
        "loss_sum": pytest.approx(total**2 / 2),
        "loss_mean": pytest.approx(total**2 / 2 / 6),
        "token_count": 6,
        "total": pytest.approx(total),
        "datums": 3.0,
    }


def test_a_loop_with_it_learns_and_its_step_shares_the_cycle(client: trio.TrainingClient) -> None:
    losses = []
    for _ in range(5):
        trained, stepped = client.forward_backward_custom(BATCH, masked), client.optim_step(ADAM)
        losses.append(trained.result(10).metrics["loss_sum"])
        assert stepped.result(10).metrics["step"] == len(losses)
        assert trained.cycle == stepped.cycle
    assert losses == sorted(losses, reverse=True)


async def test_async_gives_the_same_and_neither_loop_is_blocked(client: trio.TrainingClient) -> None:
    expected = client.forward_backward_custom(BATCH, masked).result(10)
    turns = threading.Semaphore(0)

    async def turn() -> None:
        """Both loops go on while the loss is computed: the client's answers a request, the user's takes it."""
        while not released.is_set():
            await (await client.forward_async(custom_loss.to_score(BATCH), "cross_entropy"))
            turns.release()

    released = threading.Event()

    def slow(data: Sequence[trio.Datum], logprobs: Sequence[Tensor]) -> Loss:
        for _ in range(3):
            assert turns.acquire(timeout=30), "an event loop stood still while the loss was computed"
        released.set()
        return masked(data, logprobs)

    turning = asyncio.ensure_future(turn())
    output = await (await client.forward_backward_custom_async(BATCH, slow))
    await turning
    assert output.metrics == expected.metrics


def fail(data: Sequence[trio.Datum], logprobs: Sequence[Tensor]) -> Loss:
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize(
    ("loss_fn", "kind", "words"),
    [
        (fail, ZeroDivisionError, "mine"),
        (lambda data, logprobs: logprobs[0].sum(), TypeError, "must return"),
        (lambda data, logprobs: (1.0, {}), TypeError, "torch.Tensor, got float"),
        (lambda data, logprobs: (logprobs[0], {}), ValueError, r"scalar, got shape \[3\]"),
        (lambda data, logprobs: (logprobs[0].sum().detach(), {}), ValueError, "does not depend"),
        (lambda data, logprobs: (logprobs[0].sum(), {"name": "x"}), ValueError, "could not convert"),
        (lambda data, logprobs: (logprobs[0].sum() * torch.inf, {}), trio.NonFiniteInput, "datum 0, position 0"),
        (lambda data, logprobs: ((logprobs[1] - logprobs[1]).sqrt().sum(), {}), trio.NonFiniteInput, "datum 1"),
        (lambda data, logprobs: (logprobs[0].sum() + torch.nan, {}), trio.NonFiniteInput, "custom loss is nan"),
    ],
)
async def test_a_bad_loss_submits_nothing(
    client: trio.TrainingClient, sent: list[Any], loss_fn: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        client.forward_backward_custom(BATCH, loss_fn)
    with pytest.raises(kind, match=words):
        await client.forward_backward_custom_async(BATCH, loss_fn)
    assert [op for op, _ in sent] == ["forward", "forward"]
    assert isinstance(client.optim_step(ADAM).exception(10), trio.NoGradient)  # not even a poisoned update


def test_bad_data_are_refused_before_the_loss_is_called(client: trio.TrainingClient) -> None:
    with pytest.raises(trio.EmptyBatch):
        client.forward_backward_custom([], fail)
    with pytest.raises(trio.PayloadInvalid, match="datum 0 is a str"):
        client.forward_backward_custom(["text"], fail)  # type: ignore[list-item]
    with pytest.raises(trio.PayloadInvalid, match="list of Datum"):
        client.forward_backward_custom(BATCH[0], fail)  # type: ignore[arg-type]
    with pytest.raises(trio.MissingLossInput):
        client.forward_backward_custom([trio.Datum(trio.ModelInput.from_ints([1]), {})], fail)


def test_it_works_where_gradients_are_off_and_datums_go_unused(client: trio.TrainingClient) -> None:
    def first(data: Sequence[trio.Datum], logprobs: Sequence[Tensor]) -> Loss:
        return -logprobs[0].sum(), {}

    with torch.no_grad():
        trained = client.forward_backward_custom(BATCH, first)
    with torch.inference_mode():
        again = client.forward_backward_custom(BATCH, first)
    assert trained.result(10).metrics == again.result(10).metrics
    assert trained.result(10).metrics["token_count"] == 3


def test_a_pair_split_over_requests_is_still_one_loss(
    client: trio.TrainingClient, sent: list[tuple[str, list[trio.Datum]]]
) -> None:
    whole = client.forward_backward_custom(BATCH, masked).result(10)
    client._limits = type(client._limits)(tokens=4)
    split = client.forward_backward_custom(BATCH, masked)
    output = split.result(10)
    assert len(split.seqs) == 3
    assert output.metrics == whole.metrics
    before, after = ([d.loss_fn_inputs["weights"].tolist() for d in sent[i][1]] for i in (1, 3))
    assert before == after
