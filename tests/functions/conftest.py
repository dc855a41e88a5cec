"""The function tests run on Valkey and on Redis."""

from __future__ import annotations

import pytest

from tests.conftest import Server


@pytest.fixture(scope="session")
def server(any_server: Server) -> Server:
    return any_server
