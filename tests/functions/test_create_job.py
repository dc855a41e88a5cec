"""create_job, add_tenant: how a job and its tenant begin."""

from __future__ import annotations

import json

import pytest
from redis.exceptions import ResponseError

from mainspring_broker import functions, keys
from mainspring_broker.errors import JobExists, ServiceUnavailable, UnknownBaseModel, UnknownTenant
from tests.helpers import Scene


@pytest.fixture
def ready(scene: Scene) -> Scene:
    """A pool with a worker and a tenant."""
    scene.register("w1")
    scene.add_tenant("acme")
    return scene


def test_a_created_job_is_open_and_empty(ready: Scene) -> None:
    head = ready.create(spec={"rank": 8, "name": "hello"})
    assert (head.status, head.last_seq, head.done_seq) == ("created", 0, 0)
    assert head.chain == functions.chain_start("acme", "j1", "writer-of-j1")
    job = {k.decode(): v.decode() for k, v in ready.r.hgetall(keys.job(ready.pool, "acme", "j1")).items()}
    assert (job["state"], job["base_model"], job["rank"], job["worker"]) == ("open", "tiny", "8", "")
    assert job["lineage"] == job["chain"] == head.chain
    assert json.loads(job["spec"]) == {"rank": 8, "name": "hello"}
    assert ready.r.smembers(keys.jobs(ready.pool, "acme")) == {b"j1"}


def test_the_same_writer_may_repeat_itself(ready: Scene) -> None:
    ready.create()
    before = ready.everything()
    assert ready.create().status == "have"
    assert ready.everything() == before


def test_a_repeat_after_some_requests_tells_how_far_the_job_is(ready: Scene) -> None:
    job = ready.job().update()
    head = ready.create()
    assert (head.status, head.last_seq, head.chain, head.done_seq) == ("have", 2, job.chain, 0)


def test_another_writer_cannot_take_the_id(ready: Scene) -> None:
    ready.create()
    before = ready.everything()
    with pytest.raises(JobExists, match="acme/j1"):
        ready.create(writer="somebody-else")
    assert ready.everything() == before


@pytest.mark.parametrize(
    "name", ["", "a/b", "..", "-", "a:queue", "a:outcomes", "a b", "a\n", b"j\xff", "é", "x" * 101], ids=repr
)
def test_a_name_that_could_be_taken_for_something_else_is_refused(ready: Scene, name: str | bytes) -> None:
    """The worker makes keys and folders of it, and reads it from JSON."""
    before = ready.everything()
    key = keys.job(ready.pool, "acme", "").encode() + (name if isinstance(name, bytes) else name.encode())
    with pytest.raises(ResponseError, match="INVALID"):
        ready.r.fcall("ms_create_job", 1, key, "acme", name, "writer", "tiny", 8, "{}")  # type: ignore[arg-type]
    assert ready.everything() == before


def test_a_key_of_another_job_is_refused(ready: Scene) -> None:
    before = ready.everything()
    with pytest.raises(ResponseError, match="INVALID"):
        ready.r.fcall("ms_create_job", 1, keys.job(ready.pool, "acme", "a"), "acme", "b", "writer", "tiny", 8, "{}")  # type: ignore[arg-type]
    assert ready.everything() == before


def test_two_jobs_of_one_name_begin_with_different_chains(ready: Scene) -> None:
    ready.add_tenant("beta")
    chains = {
        ready.create(writer="one").chain,
        ready.create("beta", writer="one").chain,
        ready.create("acme", "j2", writer="one").chain,
    }
    assert len(chains) == 3


def test_an_unknown_tenant_is_refused(ready: Scene) -> None:
    with pytest.raises(UnknownTenant, match="mainspring tenants add"):
        ready.create("nobody")
    assert not ready.r.exists(keys.job(ready.pool, "nobody", "j1"))


def test_before_the_first_worker_nobody_knows_the_base_model(scene: Scene) -> None:
    scene.add_tenant("acme")
    with pytest.raises(ServiceUnavailable, match="mainspring worker"):
        scene.create()


def test_another_base_model_is_refused_with_the_name_of_the_pools_own(ready: Scene) -> None:
    with pytest.raises(UnknownBaseModel, match="tiny") as caught:
        ready.create(base_model="huge")
    assert caught.value.details == {"base_model": "tiny"}


def test_the_base_model_may_be_named_by_its_path(ready: Scene) -> None:
    assert ready.create(base_model="models/tiny").status == "created"
    assert ready.r.hget(keys.job(ready.pool, "acme", "j1"), "base_model") == b"tiny"


def test_add_tenant_says_whether_it_is_new_and_wakes_the_clock(scene: Scene) -> None:
    assert scene.add_tenant("acme", weight=2.5)
    assert scene.r.hgetall(keys.tenants(scene.pool)) == {b"acme": b"2.5"}
    assert scene.r.llen(keys.bell(scene.pool)) == 1


def test_add_tenant_again_sets_the_weight(scene: Scene) -> None:
    scene.add_tenant("acme")
    assert not scene.add_tenant("acme", weight=3)
    assert scene.r.hgetall(keys.tenants(scene.pool)) == {b"acme": b"3"}
    assert scene.r.llen(keys.bell(scene.pool)) == 1  # never more than one token
