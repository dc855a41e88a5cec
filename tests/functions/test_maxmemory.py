"""A full Redis: nothing new comes in, and what was accepted can still be finished."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mainspring_broker.errors import ServerFull
from tests.helpers import Scene, taken


@pytest.fixture
def full(scene: Scene) -> Iterator[Scene]:
    """Two updates of one job were accepted, then memory ran out."""
    scene.register("w1")
    scene.job().update().update()
    scene.lead()
    scene.r.config_set("maxmemory", 1)
    yield scene
    scene.r.config_set("maxmemory", 0)


def test_a_new_job_or_tenant_is_refused_with_a_typed_error_and_leaves_nothing(full: Scene) -> None:
    before = full.everything()
    with pytest.raises(ServerFull, match="maxmemory"):
        full.create(job="j2")
    with pytest.raises(ServerFull, match="maxmemory"):
        full.add_tenant("beta")
    assert full.everything() == before


def test_the_clock_keeps_its_lease_and_the_workers_finish_what_was_accepted(full: Scene) -> None:
    for cycle in (1, 2):
        assert full.lead()
        assert full.tick().cycle == cycle
        assert full.heartbeat()
        assert taken(full.commit()) == {"j1": [2 * cycle - 1, 2 * cycle]}
    assert full.tick().status == "idle"
    assert full.resign()


def test_a_worker_may_die_and_another_take_over(full: Scene) -> None:
    full.tick()
    full.requeue("w1")
    full.register("w2")
    full.tick()
    assert taken(full.commit("w2")) == {"j1": [1, 2]}


def test_a_standby_clock_can_take_over(full: Scene) -> None:
    full.resign()
    assert full.lead("standby")
    assert full.tick(token="standby").status == "started"


def test_a_submit_is_refused_and_a_request_can_be_cancelled(scene: Scene) -> None:
    scene.register("w1")
    job = scene.job().update()
    scene.r.config_set("maxmemory", 1)
    try:
        with pytest.raises(ServerFull):
            job.update()
        assert job.cancel(1)
    finally:
        scene.r.config_set("maxmemory", 0)
