"""`mock://`: a training loop runs in the client's own process, with a service's cycles, errors and checkpoints."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

import mainspring as trio
from mainspring import mock
from tests.fundamentals import programs
from tests.helpers import wait_until

ADAM = trio.AdamParams(learning_rate=1e-3)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only waiting for a result makes a cycle begin."""
    monkeypatch.setattr(mock, "PATIENCE_S", 60.0)


@pytest.fixture
def service() -> Iterator[trio.ServiceClient]:
    with trio.ServiceClient("mock://") as client:
        yield client


@pytest.fixture
def client(service: trio.ServiceClient) -> trio.TrainingClient:
    return service.create_lora_training_client("mainspring-tiny", rank=8, seed=1)


def make_batch(first: int = 1, datums: int = 2, tokens: int = 5, **inputs: list[float]) -> list[trio.Datum]:
    ids = [list(range(first + 10 * i, first + 10 * i + tokens + 1)) for i in range(datums)]
    return [trio.Datum(trio.ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:], **inputs}) for row in ids]


def update(client: trio.TrainingClient, batch: list[trio.Datum], loss_fn: str = "cross_entropy") -> float:
    trained, stepped = client.forward_backward(batch, loss_fn), client.optim_step(ADAM)
    assert stepped.result(10).metrics["grad_norm"] >= 0
    assert trained.cycle == stepped.cycle
    return trained.result(10).metrics["loss_sum"]


# -- results ----------------------------------------------------------------------------------------------------------


def test_the_loss_falls_on_what_is_trained_and_on_nothing_else(client: trio.TrainingClient) -> None:
    seen, unseen = make_batch(1), make_batch(500)
    before = client.forward(unseen, "cross_entropy").result(10)
    losses = [update(client, seen) for _ in range(10)]
    assert losses == sorted(losses, reverse=True)
    assert 0 < losses[-1] < 0.8 * losses[0]
    after = client.forward(unseen, "cross_entropy").result(10)
    np.testing.assert_array_equal(
        before.loss_fn_outputs[1]["logprobs"].array, after.loss_fn_outputs[1]["logprobs"].array
    )


def test_a_negative_advantage_makes_tokens_unlikelier(client: trio.TrainingClient) -> None:
    start = client.forward(make_batch(), "cross_entropy").result(10)
    logprobs = start.loss_fn_outputs[0]["logprobs"].tolist()
    batch = make_batch(datums=1, logprobs=logprobs, advantages=[1.0, 1.0, 1.0, -1.0, 0.0])
    for _ in range(3):
        update(client, batch, "importance_sampling")
    after = client.forward(batch, "importance_sampling").result(10).loss_fn_outputs[0]["logprobs"].array
    assert (np.sign(after - np.array(logprobs, np.float32)) == [1, 1, 1, -1, 0]).all()


def test_two_runs_are_the_same() -> None:
    runs = []
    for _ in range(2):
        with trio.ServiceClient("mock://") as service:
            client = service.create_lora_training_client("mainspring-tiny")
            runs.append([update(client, make_batch(i)) for i in range(5)])
    assert runs[0] == runs[1]


def test_jobs_are_apart(service: trio.ServiceClient, client: trio.TrainingClient) -> None:
    other = service.create_lora_training_client("mainspring-tiny")
    first = [update(client, make_batch()) for _ in range(3)]
    assert [update(other, make_batch()) for _ in range(3)] == first


def test_metrics_and_outputs_have_the_services_form(client: trio.TrainingClient) -> None:
    batch = make_batch()
    batch[0] = trio.Datum(batch[0].model_input, {"target_tokens": [2, -100, 4, 5, 6], "weights": [1, 1, 0, 1, 2]})
    output = client.forward_backward(batch, "cross_entropy").result(10)
    assert output.metrics.keys() == {"loss_sum", "loss_mean", "token_count"}
    assert output.metrics["token_count"] == 3 + 5
    rows = [row["logprobs"] for row in output.loss_fn_outputs]
    assert [(len(row), row.dtype) for row in rows] == [(5, "float32")] * 2
    assert rows[0].array[1] == 0
    assert (rows[1].array < 0).all()
    assert client.optim_step(ADAM).result(10).metrics.keys() == {"grad_norm", "step", "learning_rate"}


# -- cycles -----------------------------------------------------------------------------------------------------------


async def test_the_programs_of_the_page_run_and_pairs_share_a_cycle(client: trio.TrainingClient) -> None:
    updates = [await programs.submit_first_then_wait(client, make_batch(), ADAM) for _ in range(5)]
    assert [(a.cycle, b.cycle) for a, b, _ in updates] == [(n, n) for n in range(1, 6)]
    first, second, _ = await programs.submit_and_wait(client, make_batch(), ADAM)
    assert (first.cycle, second.cycle) == (6, 7)
    results = await programs.train_pipelined(client, [make_batch()] * 6, 1e-3)
    losses = [result.metrics["loss_sum"] for result in results]
    assert losses == sorted(losses, reverse=True)
    assert client.cycle_report().period == 1


async def test_a_pair_shares_a_cycle_also_when_its_first_half_is_awaited_at_once(client: trio.TrainingClient) -> None:
    trained = await client.forward_backward_async(make_batch(), "cross_entropy")
    waiting = asyncio.ensure_future(trained.result_async())
    stepped = await client.optim_step_async(ADAM)
    await waiting
    assert (await stepped).metrics["step"] == 1
    assert trained.cycle == stepped.cycle


def test_queued_updates_take_a_cycle_each(client: trio.TrainingClient) -> None:
    futures = []
    for _ in range(3):
        futures += [client.forward_backward(make_batch(), "cross_entropy"), client.optim_step(ADAM)]
    futures += [client.save_state("x"), client.forward(make_batch(), "cross_entropy")]
    assert futures[-1].result(10).metrics["token_count"] == 10
    assert [future.cycle for future in futures] == [1, 1, 2, 2, 3, 3, 3, 4]


def test_what_nobody_waits_for_runs_too(client: trio.TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mock, "PATIENCE_S", 0.01)
    client.forward_backward(make_batch(), "cross_entropy")
    future = client.optim_step(ADAM)
    wait_until(future.done, "the mock has run what nobody waits for")


@pytest.mark.parametrize(("ops", "cycles"), [
    ("init forward forward_backward optim_step save_state save_weights end", [7]),
    ("forward_backward optim_step forward_backward optim_step", [2, 2]),
    ("optim_step optim_step save_state load_state forward", [1, 2, 2]),
    ("save_weights forward init init", [1, 1, 1, 1]),
])  # fmt: skip
def test_the_prefix_rule_is_the_clocks(ops: str, cycles: list[int]) -> None:
    from mainspring_clock.policy import Header, prefix

    names = ops.split()
    job = mock._Job("w", "c", queue=deque(mock.Outgoing(i, "", op, 0, "", b"") for i, op in enumerate(names)))
    found = []
    while job.queue:
        headers = [Header(request.seq, request.op, 0) for request in job.queue]
        taken = mock._prefix(job)
        assert [request.seq for request in taken] == [header.seq for header in prefix(headers, 1, True)]
        found.append(len(taken))
    assert found == cycles


# -- errors -----------------------------------------------------------------------------------------------------------

GOOD = {"logprobs": [-1.0] * 5, "advantages": [1.0] * 5}


def one(tokens: list[int], **inputs: list[float]) -> list[trio.Datum]:
    return [trio.Datum(trio.ModelInput.from_ints(tokens), inputs)]


@pytest.mark.parametrize(
    ("batch", "loss_fn", "config", "kind"),
    [
        ([], "cross_entropy", {}, trio.EmptyBatch),
        (one([], target_tokens=[]), "cross_entropy", {}, trio.EmptyDatum),
        (one([1, 2], target_tokens=[2]), "cross_entropy", {}, trio.LengthMismatch),
        (one([1, 2], target_tokens=[2, 3], weights=[1.0]), "cross_entropy", {}, trio.LengthMismatch),
        (one([1, -5], target_tokens=[2, 3]), "cross_entropy", {}, trio.TokenOutOfRange),
        (one([1, 2], target_tokens=[2, -1]), "cross_entropy", {}, trio.TokenOutOfRange),
        (one([1, 2], target_tokens=[2, 3], weights=[1.0, float("nan")]), "cross_entropy", {}, trio.NonFiniteInput),
        (one([1] * 40_000, target_tokens=[1] * 40_000), "cross_entropy", {}, trio.SequenceTooLong),
        (one([1, 2]), "cross_entropy", {}, trio.MissingLossInput),
        (one([1, 2], target_tokens=[2.0, 3.0]), "cross_entropy", {}, trio.PayloadInvalid),
        (make_batch(), "ppo", {}, trio.MissingLossInput),
        (make_batch(**GOOD), "cross_entropy", {}, trio.UnknownLossInput),
        (make_batch(**GOOD), "ppo", {"epsilon": 0.2}, trio.InvalidLossConfig),
        (make_batch(**GOOD), "reinforce", {}, trio.UnknownLoss),
    ],
)
def test_bad_data_fail_with_the_services_errors_and_poison_the_update(
    client: trio.TrainingClient, batch: list[trio.Datum], loss_fn: str, config: dict[str, float], kind: type[Exception]
) -> None:
    trained, stepped = client.forward_backward(batch, loss_fn, config), client.optim_step(ADAM)
    assert type(trained.exception(10)) is kind
    assert type(stepped.exception(10)) is trio.PrecedingRequestFailed
    update(client, make_batch())


def test_other_refusals(service: trio.ServiceClient, client: trio.TrainingClient) -> None:
    assert isinstance(client.optim_step(ADAM).exception(10), trio.NoGradient)
    with pytest.raises(trio.UnknownBaseModel, match="mock://other"):
        service.create_lora_training_client("other")
    with trio.ServiceClient("mock://org/other") as other:
        assert other.create_lora_training_client("org/other").base_model == "org/other"
    with pytest.raises(trio.InvalidHyperparameter):
        service.create_lora_training_client("mainspring-tiny", rank=0)
    lost = service.create_lora_training_client("mainspring-tiny", rank=1000)
    assert isinstance(lost.forward(make_batch(), "cross_entropy").exception(10), trio.StateLost)
    client.end().result(10)
    with pytest.raises(trio.JobEnded):
        client.forward(make_batch(), "cross_entropy")


def test_a_request_can_be_cancelled_before_somebody_waits(client: trio.TrainingClient) -> None:
    future = client.forward(make_batch(), "cross_entropy")
    assert future.cancel()
    assert isinstance(future.exception(10), trio.RequestCancelled)
    assert not future.cancel()


def test_a_fault_of_the_mock_fails_one_request(client: trio.TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("mainspring.mock_model.check", lambda op: 1 / 0)
        future = client.forward(make_batch(), "cross_entropy")
        assert isinstance(future.exception(10), trio.InternalError)
    update(client, make_batch())


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_carry_weights_and_optimizer(service: trio.ServiceClient, client: trio.TrainingClient) -> None:
    for _ in range(3):
        update(client, make_batch())
    saved = client.save_state("three").result(10)
    exported = client.save_weights_for_sampler("three").result(10)
    assert isinstance(client.save_state("three").exception(10), trio.CheckpointExists)
    on = [update(client, make_batch()) for _ in range(3)]
    again = service.create_training_client_from_state_with_optimizer(saved.path)
    assert [update(again, make_batch()) for _ in range(3)] == on
    weights_only = service.create_training_client_from_state(exported.path)
    assert weights_only.rank == 8
    assert update(weights_only, make_batch()) == on[0]
    with pytest.raises(trio.NoOptimizerState):
        service.create_training_client_from_state_with_optimizer(exported.path)
    with pytest.raises(trio.CheckpointNotFound):
        service.create_training_client_from_state(saved.path + "x")


# -- nothing else -----------------------------------------------------------------------------------------------------


def test_no_connection_and_no_torch() -> None:
    """Sockets are refused; an event loop's own pair is made without the module's functions for clients."""
    script = (
        "import socket, sys, mainspring as trio\n"
        "def refuse(*_): raise AssertionError('a mock connects to nothing')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
        "with trio.ServiceClient('mock://') as s, s.create_lora_training_client('mainspring-tiny') as c:\n"
        "    d = trio.Datum(trio.ModelInput.from_ints([1, 2]), {'target_tokens': [2, 3]})\n"
        "    f, o = c.forward_backward([d], 'cross_entropy'), c.optim_step(trio.AdamParams())\n"
        "    print(f.result(10).metrics['token_count'], o.result(10).metrics['step'])\n"
        "print([m for m in ('torch', 'transformers', 'mainspring.connection') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.split("\n")[:2], done.stderr) == (["2 1", "[]"], "")


def test_the_environment_may_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_URL", "mock://")
    with trio.ServiceClient() as service:
        assert service.get_server_capabilities().base_model == "mainspring-tiny"
        assert "mock://" in repr(service)
