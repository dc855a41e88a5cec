"""tick: what a boundary takes, places and hands out, and what it leaves alone."""

from __future__ import annotations

import pytest

from mainspring_broker import keys
from mainspring_broker.errors import NotLeader
from mainspring_broker.functions import Header
from tests.helpers import Scene, taken


@pytest.fixture
def busy(scene: Scene) -> Scene:
    """A pool with one worker."""
    scene.register("w1")
    return scene


def test_a_clock_without_the_lease_changes_nothing(busy: Scene) -> None:
    busy.job().update()
    busy.lead("another")
    before = busy.everything()
    with pytest.raises(NotLeader):
        busy.tick(token=busy.token)
    assert busy.everything() == before


def test_a_clock_whose_lease_ran_out_is_refused_even_if_nobody_else_leads(busy: Scene) -> None:
    with pytest.raises(NotLeader):
        busy.tick(token=busy.token)


def test_a_tick_starts_a_cycle_and_prolongs_the_lease(busy: Scene) -> None:
    busy.job().update(tokens=12)
    busy.lead(lease_ms=5_000)
    reply = busy.tick(token=busy.token, lease_ms=60_000)
    assert (reply.status, reply.cycle, reply.requests, reply.tokens, reply.jobs, reply.unplaced) == (
        "started", 1, 2, 12, 1, 0,
    )  # fmt: skip
    assert busy.r.pttl(keys.lease(busy.pool)) > 5_000
    assert (busy.clock("cycle"), busy.clock("state")) == ("1", "running")


def test_the_batch_says_all_that_the_worker_needs(busy: Scene) -> None:
    job = busy.job().update(tokens=12)
    busy.tick()
    batch = busy.batch()
    assert batch is not None
    assert (batch.cycle, batch.started_ms) == (1, int(busy.clock("started_ms")))
    assert batch.jobs[0].requests == (Header(1, "forward_backward", 12, False), Header(2, "optim_step", 0, False))
    assert (batch.jobs[0].chain, batch.jobs[0].lineage) == (job.chain, job.field("lineage"))
    assert job.field("batch") == batch.token
    assert job.field("taken_seq") == "2"
    assert busy.ready(worker="w1") == []


def test_batches_are_named_by_the_seed_and_the_worker(busy: Scene) -> None:
    busy.register("w2")
    busy.job("j1").update()
    busy.job("j2").update()
    busy.tick(batch_seed="seed")
    one, two = busy.batch("w1"), busy.batch("w2")
    assert one is not None
    assert two is not None
    assert one.token != two.token


def test_a_tick_while_a_worker_has_not_committed_says_running_and_only_prolongs_the_lease(busy: Scene) -> None:
    busy.job("j1").update()
    busy.tick()
    busy.job("j2").update()
    before = busy.everything()
    reply = busy.tick(token=busy.token)
    assert (reply.status, reply.cycle) == ("running", 1)
    assert busy.everything() == before


def test_a_tick_without_work_is_idle_and_counts_no_cycle(busy: Scene) -> None:
    busy.job()
    reply = busy.tick()
    assert (reply.status, reply.cycle) == ("idle", 0)
    assert busy.clock("state") == "idle"
    assert not busy.r.exists(keys.pending(busy.pool), keys.cycle(busy.pool))


def test_what_arrives_during_a_cycle_is_eligible_at_the_next(busy: Scene) -> None:
    job = busy.job().submit(("forward_backward", 5))
    busy.tick()
    job.submit("optim_step")
    assert taken(busy.commit()) == {"j1": [1]}
    assert busy.ready(worker="w1") == ["j1"]
    busy.tick()
    assert taken(busy.commit()) == {"j1": [2]}


def test_one_update_of_a_lookahead_runs_in_each_cycle(busy: Scene) -> None:
    job = busy.job().update().update()
    for cycle in range(1, 6):
        assert busy.tick().cycle == cycle
        assert taken(busy.commit()) == {"j1": [2 * cycle - 1, 2 * cycle]}
        job.update()


def test_a_job_whose_queue_cannot_be_read_holds_nobody_up(busy: Scene) -> None:
    busy.job("a").update()
    busy.r.lset(keys.queue(busy.pool, "acme", "a"), 0, "nonsense")
    busy.job("b").update()
    assert busy.tick().status == "started"
    assert taken(busy.commit()) == {"b": [1, 2]}
    assert busy.tick().status == "idle"


def test_new_jobs_go_to_the_worker_with_the_fewest_jobs_and_stay_there(busy: Scene) -> None:
    busy.register("w2")
    jobs = [busy.job(name).update() for name in ("a", "b", "c")]
    assert busy.tick().jobs == 3
    assert [job.field("worker") for job in jobs] == ["w1", "w2", "w1"]
    assert busy.r.smembers(keys.worker_jobs(busy.pool, "w1")) == {b"acme/a", b"acme/c"}
    assert busy.r.hget(keys.worker(busy.pool, "w1"), "jobs") == b"2"
    busy.commit("w1")
    busy.commit("w2")
    jobs[0].update()
    assert busy.ready(worker="w1") == ["a"]
    busy.tick()
    assert taken(busy.batch("w1")) == {"a": [3, 4]}


def test_of_workers_with_equally_many_jobs_the_less_loaded_gets_the_next(busy: Scene) -> None:
    busy.register("w2")
    busy.job("a").update(tokens=1000)
    busy.job("b").update(tokens=10)
    busy.tick()
    busy.commit("w1")
    busy.commit("w2")
    later = busy.job("c").update()
    busy.tick()
    assert later.field("worker") == "w2"


def test_a_job_without_a_free_slot_waits_and_is_counted(scene: Scene) -> None:
    scene.register("w1", slots=1)
    scene.job("a").update()
    waiting = scene.job("b").update()
    reply = scene.tick()
    assert (reply.jobs, reply.unplaced) == (1, 1)
    assert scene.ready() == ["b"]
    assert waiting.field("worker") == ""
    scene.commit()
    assert scene.tick().status == "idle"
    scene.register("w2", slots=1)
    assert (scene.tick().unplaced, waiting.field("worker")) == (0, "w2")


def test_tenants_take_turns_at_free_slots(scene: Scene) -> None:
    scene.register("w1", slots=3)
    for number in range(5):
        scene.job(f"a{number}", tenant="acme").update()
    scene.job("b0", tenant="beta").update()
    assert scene.tick().unplaced == 3
    assert set(taken(scene.batch())) == {"a0", "a1", "b0"}


def test_a_slot_becomes_free_when_a_job_ends(scene: Scene) -> None:
    scene.register("w1", slots=1)
    scene.job("a").submit("end")
    scene.job("b").update()
    scene.tick()
    scene.commit()
    scene.tick()
    assert taken(scene.batch()) == {"b": [1, 2]}


def test_without_any_worker_jobs_wait(scene: Scene) -> None:
    scene.register("w1")
    scene.requeue("w1")
    scene.job().update()
    reply = scene.tick()
    assert (reply.status, reply.unplaced) == ("idle", 1)


def test_a_silent_worker_gets_nothing(scene: Scene) -> None:
    scene.register("w1")
    job = scene.job().update()
    scene.tick()
    scene.commit()
    job.update()
    scene.declare_silent("w1")
    assert scene.tick(dead_after_ms=30_000).status == "idle"
    assert scene.ready(worker="w1") == ["j1"]
    scene.heartbeat("w1")
    assert scene.tick(dead_after_ms=30_000).status == "started"


def test_a_worker_that_is_not_ready_gets_nothing(busy: Scene) -> None:
    busy.register("w2")
    busy.r.hset(keys.worker(busy.pool, "w1"), "state", "draining")
    job = busy.job().update()
    busy.tick()
    assert job.field("worker") == "w2"


def test_a_cancelled_request_is_marked_in_the_batch_and_costs_nothing(busy: Scene) -> None:
    job = busy.job().update(tokens=50)
    assert job.cancel(1)
    assert busy.tick().tokens == 0
    batch = busy.batch()
    assert batch is not None
    assert batch.jobs[0].requests[0] == Header(1, "forward_backward", 0, True)


def test_only_the_newest_batches_of_a_worker_are_kept(busy: Scene) -> None:
    job = busy.job()
    for _ in range(20):
        job.update()
        busy.tick()
        busy.commit()
    assert busy.r.xlen(keys.worker_batches(busy.pool, "w1")) == 16


def test_a_clock_that_dies_after_its_tick_leaves_a_cycle_that_the_next_one_finishes(busy: Scene) -> None:
    job = busy.job().update().update()
    busy.lead("first")
    busy.tick(token="first")
    busy.r.delete(keys.lease(busy.pool))  # its lease runs out
    busy.lead("second")
    assert busy.tick(token="second").status == "running"
    busy.commit()
    assert busy.tick(token="second").cycle == 2
    assert taken(busy.commit()) == {"j1": [3, 4]}
    assert job.field("done_seq") == "4"


def test_a_neighbour_with_many_waiting_jobs_does_not_keep_a_small_tenant_waiting(scene: Scene) -> None:
    scene.register("w1", slots=100)
    for number in range(30):
        job = scene.job(f"big{number:02}", tenant="big")
        for _ in range(3):
            job.update(tokens=100)
    scene.tick(budget=200)
    scene.commit()
    scene.job("only", tenant="small").update(tokens=100)
    scene.tick(budget=200)
    assert "only" in taken(scene.commit())


def test_a_name_of_a_tenant_may_look_like_a_number_or_a_pattern(busy: Scene) -> None:
    for tenant in ("1", "a.b-c", "present", "jobs"):
        busy.job("j.1-x", tenant=tenant).update()
    assert busy.tick(budget=10).jobs == 1
    for _ in range(3):
        busy.commit()
        assert busy.tick(budget=10).jobs == 1
