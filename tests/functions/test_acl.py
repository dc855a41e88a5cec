"""One ACL rule fences a tenant's client in: it can train, and reach nothing of the pool or of other tenants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis.exceptions import NoPermissionError

from mainspring_broker import functions, keys, library
from tests.helpers import BASE_MODEL, Scene


@pytest.fixture
def acme(scene: Scene, r: redis.Redis) -> Iterator[redis.Redis]:
    """A client logged in as the tenant "acme", with the rule of docs/tenants.md."""
    pool = scene.pool
    rule = [
        f"~ms:{{{pool}}}:t:acme:*",
        f"%R~ms:{{{pool}}}:info",
        f"%R~ms:{{{pool}}}:tenants",
        f"&ms:{{{pool}}}:t:acme:results",
        "+@read",
        "+@write",
        "+@pubsub",
        "+@connection",
        "+time",
        "-@dangerous",
        "-@admin",
        "-@scripting",  # or it could replace the function library
        "+fcall",
        "+fcall_ro",
    ]
    r.execute_command("ACL", "SETUSER", "acme", "reset", "on", ">secret", *rule)
    client = redis.Redis(
        unix_socket_path=r.connection_pool.connection_kwargs["path"], username="acme", password="secret"
    )
    yield client
    client.close()
    r.execute_command("ACL", "DELUSER", "acme")


def test_a_tenants_client_creates_submits_and_cancels(scene: Scene, acme: redis.Redis) -> None:
    scene.add_tenant("acme")
    scene.register()
    common = {"pool": scene.pool, "tenant": "acme", "job": "j1", "writer": "w"}
    head = functions.run(acme, functions.create_job(**common, base_model=BASE_MODEL, rank=8, spec={}))
    digest = functions.request_digest("init", b"body")
    call = functions.submit(**common, seq=1, chain=head.chain, op="init", tokens=0, digest=digest, payload=b"body")
    assert functions.run(acme, call).status == "accepted"
    assert functions.run(acme, functions.cancel(**common, seq=1))
    assert library.loaded_version(acme, keys.info(scene.pool)) == library.version()


def test_it_reaches_neither_another_tenant_nor_the_pool(scene: Scene, acme: redis.Redis) -> None:
    scene.register()
    theirs = scene.job("secret", tenant="other").submit("init")
    digest = functions.request_digest("end", b"")
    attempts = [
        functions.submit(
            pool=scene.pool,
            tenant="other",
            job="secret",
            writer=theirs.writer,
            seq=2,
            chain=theirs.chain,
            op="end",
            tokens=0,
            digest=digest,
            payload=b"",
        ),
        functions.add_tenant(pool=scene.pool, tenant="acme", weight=1000.0),
        functions.lead(pool=scene.pool, token="mine", lease_ms=1000, name="me"),
    ]
    before = scene.everything()
    for attempt in attempts:
        with pytest.raises(NoPermissionError):
            functions.run(acme, attempt)
    for command in (
        ("HSET", keys.info(scene.pool), "max_backlog", "1"),
        ("HGETALL", theirs.key),
        ("XADD", keys.worker_batches(scene.pool, "w1"), "*", "batch", "x"),
        ("FUNCTION", "FLUSH"),
        ("KEYS", "*"),
    ):
        with pytest.raises(NoPermissionError):
            acme.execute_command(*command)
    assert scene.everything() == before
