"""The client against a real server and a service with made-up arithmetic: what a user does."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import mainspring as trio
from mainspring_broker import functions, keys
from mainspring_broker.functions import run
from tests.fake_service import MAX_RANK, FakeService, make_batch, number_of, serving
from tests.fundamentals import programs
from tests.helpers import wait_until

ADAM = trio.AdamParams(learning_rate=0.01)


@pytest.fixture
def service(server, pool):
    with serving(server.url, pool) as running:
        yield running


@pytest.fixture
def client(server, pool, service):
    with trio.ServiceClient(server.url, pool=pool, connect_timeout_s=5, poll_interval_s=0.2) as connected:
        yield connected


@pytest.fixture
def training_client(client):
    with client.create_lora_training_client("tiny", rank=8, seed=1) as created:
        yield created


# -- the page on clock cycles -----------------------------------------------------------------------------------------


async def test_the_pipelined_program_runs_as_it_stands(any_server, pool):
    with serving(any_server.url, pool):
        async with trio.ServiceClient(any_server.url, pool=pool) as client:
            training_client = await client.create_lora_training_client_async("tiny")
            batches = [make_batch(number) for number in range(1, 8)]
            results = await programs.train_pipelined(training_client, batches, 1e-3)
            assert [number_of(result) for result in results] == [1, 2, 3, 4, 5, 6, 7]
            await (await training_client.end_async())


async def test_the_other_programs_run_too(training_client):
    for program in (programs.submit_and_wait, programs.submit_first_then_wait):
        fwdbwd, optim, result = await program(training_client, make_batch(5), ADAM)
        assert number_of(result) == 5
        assert fwdbwd.cycle <= optim.cycle


# -- requests and results ---------------------------------------------------------------------------------------------


def test_a_synchronous_loop(training_client):
    for step in (1, 2, 3):
        fwdbwd = training_client.forward_backward(make_batch(step, datums=2), "cross_entropy")
        optim = training_client.optim_step(ADAM)
        output = fwdbwd.result(30)
        assert [each["logprobs"].shape for each in output.loss_fn_outputs] == [(4,), (4,)]
        assert output.metrics == {
            "loss_sum": pytest.approx(8 * step / 1000),
            "loss_mean": pytest.approx(step / 1000),
            "token_count": 8,
        }
        assert optim.result(30).metrics == {"grad_norm": 1.0, "step": step, "learning_rate": 0.01}


def test_numpy_and_tensors_are_as_good_as_lists(training_client):
    data = [
        trio.Datum(
            trio.ModelInput.from_ints(np.arange(4)),
            {"target_tokens": np.full(4, 7), "weights": trio.TensorData(np.ones(4))},
        )
    ]
    assert number_of(training_client.forward(data, "cross_entropy").result(30)) == 7


async def test_each_operation_has_its_two_awaits(client, service):
    training_client = await client.create_lora_training_client_async("tiny", rank=8)
    forward = await training_client.forward_async(make_batch(3), "cross_entropy")
    saved = await training_client.save_weights_for_sampler_async("final")
    ended = await training_client.end_async()
    assert number_of(await forward) == 3
    job = training_client.job
    assert await saved == trio.SaveWeightsResponse(f"mainspring://{job}/x/final", f"/adapters/{job}", 7)
    assert await ended is None
    assert [op for _, _, op in service.executed] == ["init", "forward", "save_weights", "end"]


def test_a_future_tells_its_cycle_and_where_the_time_went(training_client):
    future = training_client.forward_backward(make_batch(), "cross_entropy")
    assert future.cycle is None
    future.result(30)
    assert future.cycle >= 1
    assert future.cycles == (future.cycle, future.cycle)
    assert future.timings.queued_ms == 1.0
    assert future.timings.compute_ms == 2.0
    assert future.request_ids == (f"{training_client.job}:2",)


def test_requests_of_a_job_run_in_order_of_submission(training_client, service):
    futures = [training_client.forward_backward(make_batch(number), "cross_entropy") for number in range(1, 50)]
    assert [number_of(future.result(30)) for future in futures] == list(range(1, 50))
    assert [seq for _, seq, _ in service.executed] == list(range(1, 51))


async def test_tasks_started_in_order_are_submitted_in_order(training_client, service):
    coroutines = []
    for number in range(1, 100):
        coroutines.append(training_client.forward_backward_async(make_batch(number), "cross_entropy"))
        coroutines.append(training_client.optim_step_async(ADAM))
    futures = await asyncio.gather(*coroutines)
    assert [number_of(await future) for future in futures[::2]] == list(range(1, 100))
    assert [op for _, _, op in service.executed[1:]] == ["forward_backward", "optim_step"] * 99


def test_several_jobs_of_one_client_do_not_mix(client):
    jobs = [client.create_lora_training_client("tiny", rank=8) for _ in range(5)]
    futures = [
        [job.forward_backward(make_batch(10 * index + step), "cross_entropy") for index, job in enumerate(jobs)]
        for step in range(5)
    ]
    for step, row in enumerate(futures):
        assert [number_of(future.result(30)) for future in row] == [10 * index + step for index in range(5)]


def test_futures_are_read_from_other_threads_and_event_loops(training_client):
    futures = [training_client.forward_backward(make_batch(number), "cross_entropy") for number in range(1, 21)]
    seen = []

    def block():
        seen.append([number_of(future.result(30)) for future in futures])

    async def wait():
        seen.append([number_of(await future) for future in futures])

    threads = [threading.Thread(target=target) for target in (block, lambda: asyncio.run(wait())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [list(range(1, 21))] * 4


def test_one_client_serves_many_event_loops_one_after_another(training_client):
    async def update(number):
        future = await training_client.forward_backward_async(make_batch(number), "cross_entropy")
        return number_of(await future)

    assert [asyncio.run(update(number)) for number in (1, 2, 3)] == [1, 2, 3]


# -- splitting --------------------------------------------------------------------------------------------------------


def test_a_batch_above_the_budget_runs_in_parts_of_one_update(server, pool):
    with (
        serving(server.url, pool, token_budget=10) as service,
        trio.ServiceClient(server.url, pool=pool) as client,
        client.create_lora_training_client("tiny") as training_client,
    ):
        data = [datum for number in range(1, 6) for datum in make_batch(number)]  # 20 tokens, 4 each
        future = training_client.forward_backward(data, "cross_entropy")
        training_client.optim_step(ADAM).result(30)
        output = future.result(30)
        assert [round(-1000 * each["logprobs"].tolist()[0]) for each in output.loss_fn_outputs] == [1, 2, 3, 4, 5]
        assert output.metrics["token_count"] == 20
        assert output.metrics["loss_sum"] == pytest.approx(0.06)
        assert output.metrics["loss_mean"] == pytest.approx(0.003)
        assert future.seqs == (2, 3, 4)
        assert [op for _, _, op in service.executed] == ["init", *["forward_backward"] * 3, "optim_step"]


def test_a_batch_above_the_payload_limit_is_split_and_a_datum_above_it_refused(server, pool):
    with (
        serving(server.url, pool, max_payload_bytes=1000),
        trio.ServiceClient(server.url, pool=pool) as client,
        client.create_lora_training_client("tiny") as training_client,
    ):
        future = training_client.forward_backward(make_batch(3, datums=40), "cross_entropy")
        assert len(future.result(30).loss_fn_outputs) == 40
        assert len(future.seqs) > 1
        with pytest.raises(trio.PayloadTooLarge, match="datum 0"):
            training_client.forward_backward(make_batch(3, tokens=1000), "cross_entropy")
        assert training_client.optim_step(ADAM).result(30).metrics["step"] == 1


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_failed_request_raises_its_error_and_the_job_goes_on(training_client):
    empty = training_client.forward_backward([], "cross_entropy")
    poisoned = training_client.optim_step(ADAM)
    good = training_client.forward_backward(make_batch(4), "cross_entropy")
    with pytest.raises(trio.EmptyBatch):
        empty.result(30)
    with pytest.raises(trio.PrecedingRequestFailed):
        poisoned.result(30)
    assert number_of(good.result(30)) == 4


def test_what_has_no_wire_form_is_refused_by_the_submit_itself(training_client):
    with pytest.raises(trio.PayloadInvalid, match="datum 0: target_tokens"):
        training_client.forward_backward([trio.Datum(trio.ModelInput.from_ints([1]), {"target_tokens": ["x"]})], "ce")
    assert number_of(training_client.forward(make_batch(2), "cross_entropy").result(30)) == 2


async def test_a_job_that_cannot_be_opened_says_so_in_its_futures(client):
    training_client = await client.create_lora_training_client_async("tiny", rank=MAX_RANK + 1)
    future = await training_client.forward_backward_async(make_batch(), "cross_entropy")
    with pytest.raises(trio.StateLost, match="rank 65 is above 64") as caught:
        await future
    assert isinstance(caught.value.__cause__, trio.InvalidHyperparameter)


def test_an_ended_job_takes_no_more_requests(client):
    training_client = client.create_lora_training_client("tiny")
    training_client.end().result(30)
    with pytest.raises(trio.JobEnded):
        training_client.optim_step(ADAM)
    training_client.close()  # once more is no error


def test_unknown_tenant_and_unknown_base_model_are_said_at_once(server, pool, service):
    with trio.ServiceClient(server.url, pool=pool, tenant="nobody") as client:
        with pytest.raises(trio.UnknownTenant, match="mainspring tenants add"):
            client.create_lora_training_client("tiny")
    with trio.ServiceClient(server.url, pool=pool) as client:
        with pytest.raises(trio.UnknownBaseModel, match="'tiny'") as caught:
            client.create_lora_training_client("huge")
        assert caught.value.details["base_model"] == "tiny"


def test_a_job_id_of_ones_own_is_taken_once(client):
    assert client.create_lora_training_client("tiny", job="mine").job == "mine"
    with pytest.raises(trio.JobExists):
        client.create_lora_training_client("tiny", job="mine")
    with pytest.raises(ValueError, match="job"):
        client.create_lora_training_client("tiny", job="no/slash")


def test_the_base_model_may_be_named_by_its_path(client):
    assert client.create_lora_training_client("/models/tiny").base_model == "tiny"


def test_seed_and_flags_are_recorded(client, server, pool):
    first, second = (client.create_lora_training_client("tiny", train_mlp=False) for _ in range(2))
    assert first.seed != second.seed
    assert first.job != second.job
    with server.client() as r:
        spec = r.hget(keys.job(pool, "default", first.job), "spec").decode()
    assert f'"seed": {first.seed}' in spec
    assert '"train_mlp": false' in spec


# -- waiting for the service ------------------------------------------------------------------------------------------


def test_capabilities(server, pool):
    with (
        serving(server.url, pool, max_backlog=7, token_budget=100),
        trio.ServiceClient(server.url, pool=pool) as client,
    ):
        expected = trio.ServerCapabilities(
            base_model="tiny",
            base_model_path="/models/tiny",
            vocab_size=1000,
            max_length=64,
            max_backlog=7,
            max_backlog_bytes=None,
            max_payload_bytes=None,
            token_budget=100,
        )
        assert client.get_server_capabilities() == expected
        assert asyncio.run(client.get_server_capabilities_async()) == expected


def test_no_server_says_where_it_looked_and_what_to_start(tmp_path):
    with trio.ServiceClient(f"unix://{tmp_path}/nothing", connect_timeout_s=0.1) as client:
        with pytest.raises(trio.ServiceUnavailable, match=r"nothing.*mainspring up.*MAINSPRING_URL"):
            client.create_lora_training_client("tiny")


def test_a_wrong_password_is_said_at_once(own_server):
    url = own_server.url.replace("unix://", "unix://nobody:wrong@")
    with trio.ServiceClient(url) as client, pytest.raises(trio.ServiceError, match="refused the login") as caught:
        client.create_lora_training_client("tiny")
    assert "wrong@" not in caught.value.message


def test_a_missing_password_is_said_at_once(own_server):
    with own_server.client() as r:
        r.config_set("requirepass", "secret")
        try:
            with (
                trio.ServiceClient(own_server.url) as client,
                pytest.raises(trio.ServiceError, match="refused the log"),
            ):
                client.create_lora_training_client("tiny")
        finally:
            r.config_set("requirepass", "")


def test_no_clock_says_so(own_server):
    with trio.ServiceClient(own_server.url, connect_timeout_s=0.1) as client:
        with pytest.raises(trio.LibraryMissing, match="mainspring clock"):
            client.create_lora_training_client("tiny")


def test_no_worker_says_so(server, r, pool):
    run(r, functions.add_tenant(pool=pool, tenant="default"))
    with trio.ServiceClient(server.url, pool=pool, connect_timeout_s=0.1) as client:
        with pytest.raises(trio.ServiceUnavailable, match="mainspring worker"):
            client.create_lora_training_client("tiny")


def test_a_client_waits_for_a_service_that_comes_later(server, pool):
    with trio.ServiceClient(server.url, pool=pool, connect_timeout_s=30) as client:
        capabilities = client._session.start(client._session.capabilities)
        with serving(server.url, pool):
            assert capabilities.result(30).base_model == "tiny"


def test_another_version_of_the_library_is_refused_at_once(own_server):
    with own_server.client() as r:
        r.function_load(
            "#!lua name=mainspring\n"
            "redis.register_function{function_name='ms_version', callback=function() return 'old' end, flags={'no-writes'}}"
        )
    with trio.ServiceClient(own_server.url) as client, pytest.raises(trio.LibraryMismatch, match="old"):
        client.create_lora_training_client("tiny")


# -- back-pressure and cancellation -----------------------------------------------------------------------------------


async def test_a_full_backlog_holds_the_first_await(server, pool):
    with serving(server.url, pool, max_backlog=3) as service, trio.ServiceClient(server.url, pool=pool) as client:
        training_client = await client.create_lora_training_client_async("tiny")
        await (await training_client.forward_async(make_batch(), "cross_entropy"))
        with service.paused():
            futures = [await training_client.forward_backward_async(make_batch(n), "cross_entropy") for n in (1, 2, 3)]
            fourth = asyncio.ensure_future(training_client.forward_backward_async(make_batch(4), "cross_entropy"))
            assert await asyncio.wait([fourth], timeout=0.2) == (set(), {fourth})
        futures.append(await fourth)
        assert [number_of(await future) for future in futures] == [1, 2, 3, 4]


def test_many_requests_pass_a_small_backlog(server, pool):
    with (
        serving(server.url, pool, max_backlog=5),
        trio.ServiceClient(server.url, pool=pool) as client,
        client.create_lora_training_client("tiny") as training_client,
    ):

        async def all_at_once():
            futures = await asyncio.gather(
                *(training_client.forward_backward_async(make_batch(n), "cross_entropy") for n in range(1, 201))
            )
            return [number_of(await future) for future in futures]

        assert asyncio.run(all_at_once()) == list(range(1, 201))


async def test_a_submit_cancelled_in_a_full_backlog_does_not_go_in(server, pool):
    with serving(server.url, pool, max_backlog=1) as service, trio.ServiceClient(server.url, pool=pool) as client:
        training_client = await client.create_lora_training_client_async("tiny")
        await (await training_client.forward_async(make_batch(), "cross_entropy"))
        with service.paused():
            first = await training_client.forward_backward_async(make_batch(1), "cross_entropy")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(training_client.forward_backward_async(make_batch(2), "cross_entropy"), 0.2)
        third = await training_client.forward_backward_async(make_batch(3), "cross_entropy")
        assert (number_of(await first), number_of(await third)) == (1, 3)
        assert third.seqs[0] in (first.seqs[0] + 1, first.seqs[0] + 2)  # it went in, or not, but never half


def test_a_request_that_has_not_started_can_be_cancelled(training_client, service):
    training_client.forward(make_batch(), "cross_entropy").result(30)
    with service.paused():
        future = training_client.forward_backward(make_batch(), "cross_entropy")
        assert future.cancel()
    with pytest.raises(trio.RequestCancelled):
        future.result(30)
    assert not future.cancel()
    with pytest.raises(trio.PrecedingRequestFailed):
        training_client.optim_step(ADAM).result(30)


async def test_a_finished_request_cannot_be_cancelled(training_client):
    future = await training_client.forward_async(make_batch(8), "cross_entropy")
    await future
    assert not await future.cancel_async()
    assert number_of(await future) == 8


def test_cancelling_a_split_request_cancels_all_parts(server, pool):
    with (
        serving(server.url, pool, token_budget=4) as service,
        trio.ServiceClient(server.url, pool=pool) as client,
        client.create_lora_training_client("tiny") as training_client,
    ):
        training_client.forward(make_batch(), "cross_entropy").result(30)
        with service.paused():
            future = training_client.forward_backward(make_batch(datums=3), "cross_entropy")
            assert future.cancel()
        with pytest.raises(trio.RequestCancelled):
            future.result(30)


def test_blocking_in_a_callback_is_an_error_and_not_a_deadlock(training_client):
    raised = []

    def callback(_):
        for blocking in (
            lambda: training_client.forward(make_batch(), "cross_entropy"),
            lambda: future.cancel(),
            lambda: other.result(),
        ):
            try:
                blocking()
            except RuntimeError as error:
                raised.append(str(error))

    called = threading.Event()
    future = training_client.forward(make_batch(), "cross_entropy")
    other = training_client.forward(make_batch(), "cross_entropy")
    future.add_done_callback(callback)
    future.add_done_callback(lambda _: called.set())
    other.result(30)
    assert called.wait(30)
    assert len(raised) in (0, 2, 3)  # 0: it was done already, so the callback ran here; 2: the other was done too
    assert all("callback" in text for text in raised)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_leaving_the_context_ends_the_job(client, server, pool):
    with client.create_lora_training_client("tiny") as training_client:
        future = training_client.forward(make_batch(6), "cross_entropy")
    assert number_of(future.result(30)) == 6
    with server.client() as r:
        wait_until(lambda: r.hget(keys.job(pool, "default", training_client.job), "state") == b"ended", "the job ends")


def test_an_error_in_the_context_is_not_hidden_by_the_end(client):
    def fail_in_it():
        with client.create_lora_training_client("tiny"):
            client.close()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_it()


async def test_leaving_the_async_context_ends_the_job(server, pool, service):
    async with trio.ServiceClient(server.url, pool=pool) as client:
        async with await client.create_lora_training_client_async("tiny") as training_client:
            await training_client.forward_async(make_batch(), "cross_entropy")
        with pytest.raises(trio.JobEnded):
            await training_client.optim_step_async(ADAM)


def test_closing_ends_unfinished_futures_and_leaves_nothing(server, pool, service: FakeService):
    with server.client() as r:
        connections, threads = len(r.client_list()), threading.active_count()
        client = trio.ServiceClient(server.url, pool=pool)
        training_client = client.create_lora_training_client("tiny")
        with service.paused():
            futures = [training_client.forward_backward(make_batch(), "cross_entropy") for _ in range(20)]
            client.close()
            client.close()
            for future in futures:
                assert isinstance(future.exception(0), trio.ServiceClosed | None)
            assert isinstance(futures[-1].exception(0), trio.ServiceClosed)
        assert threading.active_count() == threads
        wait_until(lambda: len(r.client_list()) == connections, "all connections are closed")
        assert r.pubsub_numsub(keys.results_channel(pool, "default"))[0][1] == 0
    for blocked in (
        lambda: training_client.optim_step(ADAM),
        lambda: client.create_lora_training_client("tiny"),
        client.get_server_capabilities,
        futures[-1].cancel,
    ):
        with pytest.raises(trio.ServiceClosed):
            blocked()
    training_client.close()


async def test_closing_while_something_waits_ends_the_wait(server, pool):
    async with trio.ServiceClient(server.url, pool=pool, connect_timeout_s=60) as client:
        creating = asyncio.ensure_future(client.create_lora_training_client_async("tiny"))
        await asyncio.sleep(0)
        await client.close_async()
        with pytest.raises(trio.ServiceClosed):
            await creating


def test_a_client_that_nobody_holds_any_more_closes_itself(server, pool, service):
    threads = threading.active_count()
    future = trio.ServiceClient(server.url, pool=pool).create_lora_training_client("tiny").forward(make_batch(9), "ce")
    assert number_of(future.result(30)) == 9  # the future holds what it needs
    del future
    wait_until(lambda: threading.active_count() == threads, "the thread has ended")


def test_closing_a_client_ends_its_jobs_after_what_they_have_queued(server, pool, service):
    with trio.ServiceClient(server.url, pool=pool) as client:
        job = client.create_lora_training_client("tiny").job
        other = client.create_lora_training_client("tiny")
        other.forward_backward(make_batch(3), "ce")
        other.optim_step(ADAM)
    with server.client() as r:
        for name in (job, other.job):
            wait_until(lambda name=name: r.hget(keys.job(pool, "default", name), "state") == b"ended", f"{name} ended")
        assert r.hget(keys.job(pool, "default", other.job), "updates") == b"1"


def test_a_job_that_cannot_be_opened_does_not_keep_its_place(server, pool, client):
    refused = client.create_lora_training_client("tiny", rank=MAX_RANK + 1)
    with server.client() as r:
        key = keys.job(pool, "default", refused.job)
        wait_until(lambda: r.hget(key, "state") == b"ended", "the job has ended")
    late = refused.forward(make_batch(1), "ce")
    assert isinstance(late.exception(10), trio.StateLost)
    assert "never opened" in str(late.exception(10))


def test_mistakes_of_the_first_hour_are_named(training_client):
    with pytest.raises(AttributeError, match="result"):
        training_client.forward(make_batch(1), "ce").metrics  # noqa: B018
    with pytest.raises(trio.InvalidHyperparameter, match="AdamParams"):
        training_client.optim_step(1e-3)
    with pytest.raises(trio.PayloadInvalid, match="list of Datum"):
        training_client.forward(make_batch(1)[0], "ce")
    tokens_only = trio.Datum([1, 2, 3], {"target_tokens": [2, 3, 4]})
    assert training_client.forward([tokens_only], "ce").exception(10) is None
