"""register, heartbeat: a worker's name belongs to one process at a time."""

from __future__ import annotations

import pytest

from mainspring_broker import keys
from mainspring_broker.errors import StaleBatch, UnknownBaseModel
from tests.helpers import Scene, taken


def test_a_worker_appears_with_its_facts_and_rings_the_bell(scene: Scene) -> None:
    assert scene.register("w1", slots=4, host="a-host", pid=42) == 0
    worker = scene.r.hgetall(keys.worker(scene.pool, "w1"))
    assert (worker[b"state"], worker[b"slots"], worker[b"jobs"]) == (b"ready", b"4", b"0")
    assert (worker[b"host"], worker[b"pid"]) == (b"a-host", b"42")
    assert worker[b"incarnation"].decode() == scene.incarnations["w1"]
    assert scene.r.zscore(keys.workers(scene.pool), "w1") == float(worker[b"registered_ms"])
    assert scene.r.llen(keys.bell(scene.pool)) == 1


def test_the_first_worker_says_which_base_model_the_pool_serves(scene: Scene) -> None:
    scene.register("w1")
    assert scene.r.hgetall(keys.info(scene.pool)) == {
        b"base_model": b"tiny",
        b"base_model_path": b"models/tiny",
        b"vocab_size": b"100",
        b"max_length": b"64",
    }


def test_a_worker_with_another_base_model_is_refused_and_leaves_nothing(scene: Scene) -> None:
    scene.register("w1")
    before = scene.everything()
    with pytest.raises(UnknownBaseModel, match="one pool has one base model") as caught:
        scene.register("w2", base_model="huge")
    assert caught.value.details == {"base_model": "tiny"}
    assert scene.everything() == before


def test_a_restarted_worker_gets_the_unfinished_batch_handed_back(scene: Scene) -> None:
    scene.register("w1")
    jobs = [scene.job(name).update() for name in ("a", "b")]
    scene.tick()
    assert scene.register("w1") == 2
    assert [(job.field("batch"), job.field("taken_seq"), job.field("worker")) for job in jobs] == [("", "0", "w1")] * 2
    assert scene.ready(worker="w1") == ["a", "b"]
    assert not scene.r.exists(keys.pending(scene.pool), keys.worker_batches(scene.pool, "w1"))
    assert scene.history()[0]["workers"] == '{"w1":{"lost":true}}'
    assert scene.tick().cycle == 2
    assert taken(scene.commit()) == {"a": [1, 2], "b": [1, 2]}


def test_the_process_before_it_cannot_commit_any_more(scene: Scene) -> None:
    scene.register("w1")
    scene.job().update()
    scene.tick()
    batch, incarnation = scene.batch(), scene.incarnations["w1"]
    assert batch is not None
    executed = scene.executed(batch)
    scene.register("w1")
    before = scene.everything()
    with pytest.raises(StaleBatch):
        scene.commit(batch=batch, incarnation=incarnation, executed=executed)
    assert scene.everything() == before


def test_registering_twice_with_nothing_in_hand_changes_only_the_incarnation(scene: Scene) -> None:
    scene.register("w1")
    job = scene.job().update()
    scene.tick()
    scene.commit()
    first = scene.incarnations["w1"]
    assert scene.register("w1") == 0
    assert scene.incarnations["w1"] != first
    assert job.field("worker") == "w1"
    assert scene.r.hget(keys.worker(scene.pool, "w1"), "jobs") == b"1"
    assert scene.history() == scene.history()[:1]


def test_a_restart_while_another_worker_still_works_leaves_the_barrier_to_it(scene: Scene) -> None:
    scene.register("w1")
    scene.register("w2")
    scene.job("a").update()
    scene.job("b").update()
    scene.tick()
    scene.register("w1")
    assert scene.tick().status == "running"
    scene.commit("w2")
    assert scene.tick().cycle == 2


def test_a_heartbeat_is_noted(scene: Scene) -> None:
    scene.register("w1")
    scene.declare_silent("w1")
    before = scene.r.zscore(keys.workers(scene.pool), "w1")
    assert scene.heartbeat("w1")
    assert scene.r.zscore(keys.workers(scene.pool), "w1") >= before + 60_000


def test_the_heartbeat_of_a_replaced_process_does_not_count(scene: Scene) -> None:
    scene.register("w1")
    earlier = scene.incarnations["w1"]
    scene.register("w1")
    scene.declare_silent("w1")
    before = scene.everything()
    assert not scene.heartbeat("w1", earlier)
    assert scene.everything() == before


def test_a_worker_that_was_declared_dead_hears_so(scene: Scene) -> None:
    scene.register("w1")
    scene.requeue("w1")
    assert not scene.heartbeat("w1")
    assert not scene.r.exists(keys.workers(scene.pool), keys.worker(scene.pool, "w1"))


def test_a_heartbeat_of_a_worker_that_never_registered_leaves_nothing(scene: Scene) -> None:
    assert not scene.heartbeat("w9")
    assert scene.everything() == {}
