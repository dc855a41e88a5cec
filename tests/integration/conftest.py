"""One pool of real processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import mainspring as trio
from tests.service import Service, running_service


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("pool")) as running:
        yield running


@pytest.fixture(scope="session")
def client(service: Service) -> Iterator[trio.ServiceClient]:
    with trio.ServiceClient(service.url) as connected:
        yield connected
