"""The client on a bad day: cut connections, lost announcements, restarts that forget, results that are gone."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from contextlib import contextmanager

import pytest

import mainspring as trio
from mainspring.connection import Connection
from mainspring_broker import keys
from tests.fake_service import NAME, make_batch, number_of, serving
from tests.helpers import wait_until

ADAM = trio.AdamParams()


@pytest.fixture
def service(server, pool):
    with serving(server.url, pool) as running:
        yield running


@pytest.fixture
def client(server, pool, service):
    with trio.ServiceClient(server.url, pool=pool, poll_interval_s=0.1, rollback_window_s=0.5) as connected:
        yield connected


def cut(r, *, kind=None):
    """Kill connections of clients: those that subscribe ("pubsub"), the others ("normal"), or all."""
    for row in r.client_list(_type=kind) if kind else r.client_list():
        if row["name"] != NAME and int(row["id"]) != r.client_id():
            r.client_kill_filter(_id=row["id"])


@contextmanager
def cutting(server, kind=None, pause=lambda: random.uniform(0.001, 0.03)):
    """Kill connections at random moments, from another thread."""
    stop = threading.Event()

    def run():
        with server.client() as r:
            while not stop.wait(pause()):
                cut(r, kind=kind)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def submit_many(training_client, count):
    return await asyncio.gather(
        *(training_client.forward_backward_async(make_batch(n), "cross_entropy") for n in range(1, count + 1))
    )


async def test_a_thousand_futures_while_the_subscription_is_cut_again_and_again(client, server):
    training_client = await client.create_lora_training_client_async("tiny")
    with cutting(server, "pubsub"):
        futures = await submit_many(training_client, 1000)
        results = await asyncio.gather(*futures)
    assert [number_of(result) for result in results] == list(range(1, 1001))


async def test_each_request_goes_in_once_while_all_connections_are_cut(client, server, service):
    training_client = await client.create_lora_training_client_async("tiny")
    with cutting(server):
        futures = await submit_many(training_client, 300)
        results = await asyncio.gather(*futures)
    assert [number_of(result) for result in results] == list(range(1, 301))
    assert [seq for _, seq, _ in service.executed] == list(range(1, 302))


def test_a_submit_whose_reply_is_lost_is_repeated_and_goes_in_once(client, server, service):
    training_client = client.create_lora_training_client("tiny")
    with server.client() as r, service.paused():
        r.client_pause(300, all=False)  # writes wait: the submit is on its way, its reply is not
        accepted = threading.Thread(target=lambda: training_client.forward_backward(make_batch(3), "cross_entropy"))
        accepted.start()
        wait_until(lambda: blocked(r), "the submit waits in the server")
        cut(r, kind="normal")
        r.client_unpause()
        accepted.join()
    assert number_of(training_client.forward_backward(make_batch(4), "cross_entropy").result(30)) == 4
    assert [seq for _, seq, _ in service.executed] == [1, 2, 3]


def blocked(r):
    return any("b" in row["flags"] for row in r.client_list(_type="normal"))


def test_results_come_without_any_announcement(client, server, pool, monkeypatch):
    """The slow poll alone is enough."""

    async def silent(_):
        await asyncio.Event().wait()
        yield None

    monkeypatch.setattr(Connection, "announcements", silent)
    training_client = client.create_lora_training_client("tiny")
    futures = [training_client.forward_backward(make_batch(n), "cross_entropy") for n in (1, 2, 3)]
    assert [number_of(future.result(30)) for future in futures] == [1, 2, 3]


def test_a_neighbours_announcements_are_not_read(client, server, pool):
    training_client = client.create_lora_training_client("tiny")
    training_client.forward(make_batch(), "cross_entropy").result(30)
    with server.client() as r:
        for message in ("another:1", f"{training_client.job}:999", "nonsense", "a:b"):
            r.publish(keys.results_channel(pool, "default"), message)
    assert number_of(training_client.forward(make_batch(5), "cross_entropy").result(30)) == 5


async def test_thousands_of_abandoned_futures_leak_nothing(server, pool, service):
    channel = keys.results_channel(pool, "default")
    with server.client() as r:
        connections, threads = len(r.client_list()), threading.active_count()
        client = trio.ServiceClient(server.url, pool=pool, poll_interval_s=0.1, rollback_window_s=0.1)
        training_client = await client.create_lora_training_client_async("tiny")
        for _ in range(5):
            futures = await submit_many(training_client, 1000)
            kept = futures[::2]
            del futures
            assert [number_of(await future) for future in kept] == list(range(1, 1001, 2))
            assert r.pubsub_numsub(channel)[0][1] == 1
            assert len(r.client_list()) <= connections + 8
        sender = training_client._sender
        wait_until(lambda: sender.idle, "payloads are let go, also those of abandoned futures")
        assert threading.active_count() == threads + 1
        await client.close_async()
        wait_until(lambda: len(r.client_list()) == connections, "all connections are closed")
        assert r.pubsub_numsub(channel)[0][1] == 0
        assert threading.active_count() == threads


# -- results and jobs that are gone -----------------------------------------------------------------------------------


def test_a_result_that_is_no_longer_kept_is_said_to_be_expired(client, service, monkeypatch):
    training_client = client.create_lora_training_client("tiny")
    training_client.forward(make_batch(), "cross_entropy").result(30)
    service.result_ttl_ms = 1
    read = Connection.results

    async def too_late(connection, wanted):
        await asyncio.sleep(0.05)
        return await read(connection, wanted)

    monkeypatch.setattr(Connection, "results", too_late)
    future = training_client.forward(make_batch(), "cross_entropy")
    with pytest.raises(trio.ResultExpired, match="was executed"):
        future.result(30)


def test_a_job_that_is_gone_fails_its_futures(client, server, pool, service):
    training_client = client.create_lora_training_client("tiny")
    training_client.forward(make_batch(), "cross_entropy").result(30)
    with service.paused(), server.client() as r:
        futures = [training_client.forward_backward(make_batch(), "cross_entropy") for _ in range(2)]
        job = keys.job(pool, "default", training_client.job)
        r.delete(job, f"{job}:requests", f"{job}:queue", f"{job}:outcomes")
        r.delete(*[key for key in r.scan_iter(f"ms:{{{pool}}}:*") if b":ready:" in key or key.endswith(b":jobs")])
        for future in futures:
            with pytest.raises(trio.UnknownJob, match="is gone"):
                future.result(30)
        with pytest.raises(trio.UnknownJob):
            training_client.optim_step(ADAM)


# -- restarts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def restarted(own_server, pool):
    """A service whose server may be killed, and a client of it."""
    with own_server.client() as r:
        r.config_set("appendfsync", "always")
    with (
        serving(own_server.url, pool) as service,
        trio.ServiceClient(own_server.url, pool=pool, poll_interval_s=0.1, rollback_window_s=60) as client,
    ):
        yield own_server, service, client


def test_a_restart_of_the_server_goes_unnoticed(restarted):
    server, service, client = restarted
    training_client = client.create_lora_training_client("tiny")
    with service.paused():
        futures = [training_client.forward_backward(make_batch(n), "cross_entropy") for n in range(1, 6)]
        server.restart()
        futures += [training_client.forward_backward(make_batch(n), "cross_entropy") for n in range(6, 11)]
    assert [number_of(future.result(30)) for future in futures] == list(range(1, 11))


def test_a_submit_waits_for_a_server_that_is_away(restarted):
    server, service, client = restarted
    training_client = client.create_lora_training_client("tiny")
    with service.paused():
        server.kill()
        results = []
        thread = threading.Thread(
            target=lambda: results.append(training_client.forward_backward(make_batch(7), "cross_entropy").result(30))
        )
        thread.start()
        server.start()
    thread.join()
    assert number_of(results[0]) == 7


def test_what_a_restart_takes_back_is_sent_again(restarted, tmp_path):
    """Accepted and even executed requests are forgotten by the server; the client makes them good by itself."""
    server, service, client = restarted
    training_client = client.create_lora_training_client("tiny")
    first = training_client.forward_backward(make_batch(1), "cross_entropy")
    first.result(30)
    with service.paused():
        shutil.copytree(server.folder / "appendonlydir", tmp_path / "older")
    second = training_client.forward_backward(make_batch(2), "cross_entropy")
    second.result(30)
    with service.paused():
        third = training_client.forward_backward(make_batch(3), "cross_entropy")
        server.kill()
        shutil.rmtree(server.folder / "appendonlydir")
        shutil.copytree(tmp_path / "older", server.folder / "appendonlydir")
        server.start()
    assert number_of(third.result(30)) == 3
    fourth = training_client.optim_step(ADAM)
    fourth.result(30)
    assert [first.seqs, second.seqs, third.seqs, fourth.seqs] == [(2,), (3,), (4,), (5,)]
    assert [seq for _, seq, _ in service.executed] == [1, 2, 3, 3, 4, 5]


def test_a_server_that_stays_away_is_said_to_be_away(own_server, pool):
    with (
        serving(own_server.url, pool) as service,
        trio.ServiceClient(own_server.url, pool=pool, poll_interval_s=0.05, retry_timeout_s=0.3) as client,
    ):
        training_client = client.create_lora_training_client("tiny")
        training_client.forward(make_batch(), "cross_entropy").result(30)
        with service.paused():
            pending = training_client.forward(make_batch(), "cross_entropy")
            own_server.kill()
            with pytest.raises(trio.ServiceUnavailable, match="cannot reach Redis"):
                pending.result(30)
            with pytest.raises(trio.ServiceUnavailable, match="cannot reach Redis"):
                training_client.optim_step(ADAM)
