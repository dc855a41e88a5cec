"""One pool of real processes for the whole story, and a neighbour who keeps every cycle filled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import mainspring as trio
from tests.service import Service, running_service

BASE_MODEL = "mainspring-tiny"


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    # A wide gather window: on an idle pool, how fast this machine submits a pair must not matter. A cycle holds one busy
    # neighbour and a small job.
    settings = {"gather_ms": 150, "gather_limit_ms": 1500, "token_budget": 2048}
    with running_service(tmp_path_factory.mktemp("pool"), **settings) as running:
        yield running


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[trio.ServiceClient]:
    with trio.ServiceClient(service.url) as connected:
        yield connected


@pytest.fixture
def training_client(client: trio.ServiceClient) -> Iterator[trio.TrainingClient]:
    with client.create_lora_training_client(BASE_MODEL, rank=8, seed=1) as created:
        yield created


def make_batch(sequences: int = 1, tokens: int = 16) -> list[trio.Datum]:
    """Datums that predict the next of `tokens` ids."""
    ids = [(7 * position) % 200 + 10 for position in range(tokens + 1)]
    return [
        trio.Datum(model_input=trio.ModelInput.from_ints(ids[:-1]), loss_fn_inputs={"target_tokens": ids[1:]})
        for _ in range(sequences)
    ]


@contextmanager
def busy_pool(client: trio.ServiceClient) -> Iterator[None]:
    """Another job with work for every cycle, each long against the time that a client needs to react."""
    batch = make_batch(sequences=12, tokens=128)
    stopping = threading.Event()
    neighbour = client.create_lora_training_client(BASE_MODEL, rank=8, seed=2)

    def fill() -> None:
        waiting: list[trio.APIFuture] = []
        while not stopping.is_set():
            neighbour.forward_backward(batch, "cross_entropy")
            waiting.append(neighbour.optim_step(trio.AdamParams(learning_rate=1e-5)))
            if len(waiting) > 3:
                waiting.pop(0).result(60)
        for future in waiting:
            future.result(60)

    thread = threading.Thread(target=fill)
    thread.start()
    neighbour.forward(batch, "cross_entropy").result(60)  # the first cycles have run
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        neighbour.end().result(60)
