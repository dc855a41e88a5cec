"""requeue: a worker leaves, or is declared dead; its jobs go on elsewhere."""

from __future__ import annotations

import pytest

from mainspring_broker import keys
from mainspring_broker.errors import NotLeader, StaleBatch, WorkerReplaced
from tests.helpers import Scene, taken


def test_a_worker_that_leaves_leaves_no_keys_and_its_jobs_are_placed_anew(scene: Scene) -> None:
    scene.register("w1")
    idle, waiting = scene.job("idle").update(), scene.job("waiting").update()
    scene.tick()
    scene.commit()
    waiting.update()
    assert scene.requeue("w1", incarnation=scene.incarnations["w1"]) == 2
    assert scene.ready() == ["waiting"]
    assert (idle.field("worker"), waiting.field("worker")) == ("", "")
    assert [key for key in scene.everything() if b":worker" in key] == []
    assert scene.r.llen(keys.bell(scene.pool)) == 1
    scene.register("w2")
    idle.update()
    assert scene.tick().jobs == 2
    assert taken(scene.commit("w2")) == {"idle": [3, 4], "waiting": [3, 4]}


def test_a_job_in_flight_on_a_dead_worker_runs_elsewhere_untouched_and_in_order(scene: Scene) -> None:
    scene.register("w1")
    job = scene.job().update().update()
    scene.tick()
    scene.declare_silent("w1")
    assert scene.requeue("w1", lease=scene.token, dead_after_ms=30_000) == 1
    assert (job.field("batch"), job.field("taken_seq"), job.field("done_seq")) == ("", "0", "0")
    assert job.stream() == [1, 2, 3, 4]
    scene.register("w2")
    scene.tick()
    assert taken(scene.commit("w2")) == {"j1": [1, 2]}
    scene.tick()
    assert taken(scene.commit("w2")) == {"j1": [3, 4]}


def test_the_dead_workers_commit_is_refused_whole(scene: Scene) -> None:
    scene.register("w1")
    scene.job().update()
    scene.tick()
    batch = scene.batch()
    assert batch is not None
    executed = scene.executed(batch)
    scene.requeue("w1")
    before = scene.everything()
    with pytest.raises(StaleBatch):
        scene.commit(batch=batch, executed=executed)
    assert scene.everything() == before


def test_when_it_was_the_last_one_awaited_the_cycle_closes(scene: Scene) -> None:
    scene.register("w1")
    scene.register("w2")
    scene.job("a").update()
    scene.job("b").update()
    scene.tick()
    scene.commit("w1")
    scene.r.delete(keys.bell(scene.pool))
    scene.requeue("w2")
    assert scene.clock("state") == "boundary"
    assert scene.r.llen(keys.bell(scene.pool)) == 1
    assert scene.history()[0]["workers"] == '{"w1":{"compute_ms": 1.5},"w2":{"lost":true}}'
    assert scene.tick().cycle == 2
    assert taken(scene.commit("w1")) == {"b": [1, 2]}


def test_while_another_worker_still_works_the_cycle_stays_open(scene: Scene) -> None:
    scene.register("w1")
    scene.register("w2")
    scene.job("a").update()
    scene.job("b").update()
    scene.tick()
    scene.requeue("w2")
    assert scene.tick().status == "running"
    assert scene.history() == []
    scene.commit("w1")
    assert len(scene.history()) == 1


def test_a_worker_with_a_heartbeat_is_left_alone(scene: Scene) -> None:
    scene.register("w1")
    scene.lead()
    before = scene.everything()
    assert scene.requeue("w1", lease=scene.token, dead_after_ms=30_000) is None
    assert scene.everything() == before


def test_a_clock_without_the_lease_removes_nobody(scene: Scene) -> None:
    scene.register("w1")
    scene.lead("another")
    before = scene.everything()
    with pytest.raises(NotLeader):
        scene.requeue("w1", lease=scene.token)
    assert scene.everything() == before


def test_a_replaced_process_cannot_take_its_successor_out(scene: Scene) -> None:
    scene.register("w1")
    earlier = scene.incarnations["w1"]
    scene.register("w1")
    before = scene.everything()
    with pytest.raises(WorkerReplaced):
        scene.requeue("w1", incarnation=earlier)
    assert scene.everything() == before


def test_removing_a_worker_that_is_not_there_is_harmless(scene: Scene) -> None:
    assert scene.requeue("w9") == 0
    assert scene.requeue("w9") == 0


def test_an_idle_job_of_a_dead_worker_becomes_ready_unplaced_with_its_next_request(scene: Scene) -> None:
    scene.register("w1")
    job = scene.job().update()
    scene.tick()
    scene.commit()
    scene.requeue("w1")
    assert scene.ready() == []
    job.update()
    assert scene.ready() == ["j1"]


def test_a_request_that_arrives_between_death_and_requeue_is_not_lost(scene: Scene) -> None:
    scene.register("w1")
    job = scene.job().update()
    scene.tick()
    scene.commit()
    scene.declare_silent("w1")
    job.update()
    assert scene.tick(dead_after_ms=30_000).status == "idle"
    scene.requeue("w1", lease=scene.token, dead_after_ms=30_000)
    scene.register("w2")
    scene.tick(dead_after_ms=30_000)
    assert taken(scene.commit("w2")) == {"j1": [3, 4]}


def test_a_job_that_comes_from_another_worker_has_no_old_score_to_settle(scene: Scene) -> None:
    scene.register("w1")
    moved = scene.job("moved")
    for _ in range(5):
        moved.update(tokens=1000)
        scene.tick()
        scene.commit()
    moved.update(tokens=1000)
    scene.register("w2")
    other = scene.job("other").update(tokens=1000).update(tokens=1000)
    scene.tick()
    scene.commit("w1")
    scene.commit("w2")
    moved.update(tokens=1000)
    scene.requeue("w1")
    scene.tick(budget=1000)
    served = set(taken(scene.commit("w2")))
    scene.tick(budget=1000)
    assert served | set(taken(scene.commit("w2"))) == {"moved", "other"}
    assert other.field("worker") == moved.field("worker") == "w2"


def test_a_worker_dying_again_and_again_loses_no_request(scene: Scene) -> None:
    scene.register("w0")
    job = scene.job().update().update()
    for death in range(5):
        scene.tick()
        scene.requeue(f"w{death}")
        scene.register(f"w{death + 1}")
    for _ in range(2):
        scene.tick()
        scene.commit("w5")
    assert job.field("done_seq") == "4"
    assert [entry["id"] for entry in scene.history()] == [f"{n}-0" for n in range(1, 8)]
