"""commit: a batch becomes true as a whole, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mainspring_broker import functions, keys
from mainspring_broker.errors import StaleBatch
from tests.helpers import Scene, taken


@pytest.fixture
def running(scene: Scene) -> Scene:
    """A cycle with two jobs on one worker, a third request of job a behind them."""
    scene.register("w1")
    scene.job("a").update().submit(("forward_backward", 3), payload=b"next")
    scene.job("b").update()
    scene.tick()
    return scene


def field(scene: Scene, job: str, name: str) -> str:
    return scene.r.hget(keys.job(scene.pool, "acme", job), name).decode()


def test_results_outcomes_and_progress_become_true_together(running: Scene) -> None:
    running.commit()
    for job in ("a", "b"):
        assert (field(running, job, "done_seq"), field(running, job, "batch")) == ("2", "")
        for seq in (1, 2):
            result = keys.result(running.pool, "acme", job, seq)
            assert running.r.get(result) == b"result"
            assert 0 < running.r.pttl(result) <= 60_000
    outcomes = running.r.xrange(keys.outcomes(running.pool, "acme", "a"))
    assert [(entry, fields[b"op"], fields[b"outcome"]) for entry, fields in outcomes] == [
        (b"1-0", b"forward_backward", b"ok"),
        (b"2-0", b"optim_step", b"ok"),
    ]


def test_the_lineage_grows_with_digest_and_outcome(running: Scene) -> None:
    lineage = field(running, "a", "lineage")
    batch = running.batch()
    assert batch is not None
    executed = running.executed(batch, failed=[("a", 2)])
    running.commit(executed=executed)
    for e in executed[:2]:
        lineage = functions.lineage_next(lineage, e.digest, e.outcome)
    assert field(running, "a", "lineage") == lineage
    last = running.r.xrevrange(keys.outcomes(running.pool, "acme", "a"), count=1)[0][1]
    assert (last[b"outcome"], last[b"lineage"].decode()) == (b"internal_error", lineage)
    running.tick()
    batch = running.batch()
    assert batch is not None
    assert batch.jobs[0].lineage == lineage


def test_each_result_is_announced_to_its_tenant(running: Scene) -> None:
    with running.r.pubsub() as pubsub:
        pubsub.subscribe(keys.results_channel(running.pool, "acme"))
        assert pubsub.get_message(timeout=5)["type"] == "subscribe"
        running.commit()
        heard = [pubsub.get_message(timeout=5)["data"] for _ in range(4)]
    assert heard == [b"a:1", b"a:2", b"b:1", b"b:2"]


def test_what_is_done_leaves_queue_and_stream_and_what_is_behind_becomes_ready(running: Scene) -> None:
    running.commit()
    assert running.r.lrange(keys.queue(running.pool, "acme", "a"), 0, -1) == [b"3 forward_backward 3"]
    assert [entry for entry, _ in running.r.xrange(keys.requests(running.pool, "acme", "a"))] == [b"3-0"]
    assert field(running, "a", "backlog_bytes") == "4"
    assert running.ready(worker="w1") == ["a"]
    assert not running.r.exists(keys.queue(running.pool, "acme", "b"))


def test_counts_for_people_are_kept(running: Scene) -> None:
    running.commit(failed=[("b", 1), ("b", 2)])
    assert (field(running, "a", "updates"), field(running, "a", "failed")) == ("1", "0")
    assert (field(running, "b", "updates"), field(running, "b", "failed")) == ("0", "2")


def test_the_last_commit_closes_the_cycle_and_rings_the_bell(running: Scene) -> None:
    running.r.delete(keys.bell(running.pool))
    running.commit()
    assert running.clock("state") == "boundary"
    assert running.r.lrange(keys.bell(running.pool), 0, -1) == [b"1"]
    assert not running.r.exists(keys.pending(running.pool), keys.cycle(running.pool))


def test_the_history_tells_what_the_cycle_did(running: Scene) -> None:
    running.commit(timings={"compute_ms": 7})
    [entry] = running.history()
    assert entry["id"] == "1-0"
    assert (entry["jobs"], entry["requests"], entry["tokens"]) == ("2", "4", "20")
    assert float(entry["ms"]) >= 0
    assert json.loads(entry["plan"]) == [
        ["acme", "a", "w1", "forward_backward optim_step", 10],
        ["acme", "b", "w1", "forward_backward optim_step", 10],
    ]
    assert json.loads(entry["workers"]) == {"w1": {"compute_ms": 7}}


def test_the_history_is_bounded(scene: Scene) -> None:
    scene.register("w1")
    job = scene.job()
    for _ in range(120):
        job.submit("optim_step")
        scene.tick(history=1)
        scene.commit()
    assert scene.r.xlen(keys.cycles(scene.pool)) <= 101  # trimmed by whole nodes of 100


def test_two_workers_make_a_barrier(scene: Scene) -> None:
    for worker in ("w1", "w2"):
        scene.register(worker)
    scene.job("a").update()
    scene.job("b").update()
    scene.tick()
    scene.r.delete(keys.bell(scene.pool))
    scene.commit("w2")
    assert not scene.r.exists(keys.bell(scene.pool))
    assert scene.history() == []
    assert scene.tick().status == "running"
    scene.commit("w1")
    assert scene.r.llen(keys.bell(scene.pool)) == 1
    assert set(json.loads(scene.history()[0]["workers"])) == {"w1", "w2"}


def refused(scene: Scene, **changed: object) -> None:
    """The commit is refused, and nothing at all was written."""
    before = scene.everything()
    with pytest.raises(StaleBatch):
        scene.commit(**changed)  # type: ignore[arg-type]
    assert scene.everything() == before


def test_another_incarnation_is_refused_whole(running: Scene) -> None:
    refused(running, incarnation="a-zombie")


def test_another_batch_token_is_refused_whole(running: Scene) -> None:
    batch = running.batch()
    assert batch is not None
    refused(running, batch=replace(batch, token="0" * 40), executed=running.executed(batch))


def test_one_job_taken_back_spoils_the_whole_batch(running: Scene) -> None:
    running.r.hset(keys.job(running.pool, "acme", "b"), "batch", "")
    refused(running)


def test_a_job_that_vanished_spoils_the_whole_batch(running: Scene) -> None:
    batch = running.batch()
    assert batch is not None
    executed = running.executed(batch)
    running.r.delete(keys.job(running.pool, "acme", "b"))
    refused(running, executed=executed)
    running.r.delete(*running.r.keys(f"{keys.job(running.pool, 'acme', 'b')}*"))


@pytest.mark.parametrize(
    ("what", "kept"),
    [
        ("a last outcome is missing", [0, 2, 3]),
        ("a first outcome is missing", [1, 2, 3]),
        ("two outcomes are exchanged", [1, 0, 2, 3]),
        ("an outcome comes twice", [0, 1, 1, 2, 3]),
        ("a whole job is missing", [0, 1]),
        ("everything is missing", []),
    ],
)
def test_incomplete_outcomes_are_refused_whole(running: Scene, what: str, kept: list[int]) -> None:
    batch = running.batch()
    assert batch is not None
    executed = running.executed(batch)
    refused(running, executed=[executed[index] for index in kept])


def test_an_outcome_beyond_what_was_taken_is_refused_whole(running: Scene) -> None:
    batch = running.batch()
    assert batch is not None
    executed = running.executed(batch)
    refused(running, executed=[*executed[:2], replace(executed[1], seq=3), *executed[2:]])


def test_a_commit_that_is_repeated_because_its_reply_was_lost_is_refused_and_changes_nothing(running: Scene) -> None:
    batch = running.batch()
    assert batch is not None
    executed = running.executed(batch)
    running.commit(executed=executed)
    refused(running, batch=batch, executed=executed)
    assert taken(running.batch()) == {}


def test_an_ended_job_leaves_only_keys_that_expire(scene: Scene) -> None:
    scene.register("w1")
    scene.job("a").update().submit("end")
    scene.tick()
    assert taken(scene.commit()) == {"a": [1, 2, 3]}
    left = [key for key in scene.everything() if b":job:a" in key]
    assert sorted(key.rpartition(b":job:a")[2] for key in left) == [b"", b":result:1", b":result:2", b":result:3"]
    assert all(0 < scene.r.pttl(key) <= 60_000 for key in left)
    assert field(scene, "a", "state") == "ended"
    assert not scene.r.exists(keys.jobs(scene.pool, "acme"), keys.worker_jobs(scene.pool, "w1"))
    assert scene.r.hget(keys.worker(scene.pool, "w1"), "jobs") == b"0"
    assert scene.tick().status == "idle"


def test_a_job_may_train_save_and_end_in_one_cycle(scene: Scene) -> None:
    scene.register("w1")
    scene.job("a").submit("init", ("forward_backward", 4), "optim_step", "save_weights", "end")
    assert scene.tick().requests == 5
    scene.commit()
    assert field(scene, "a", "state") == "ended"


def test_the_end_of_a_job_also_ends_it_when_it_failed(scene: Scene) -> None:
    scene.register("w1")
    scene.job("a").submit("end")
    scene.tick()
    scene.commit(failed=[("a", 1)])
    assert field(scene, "a", "state") == "ended"


def test_the_name_of_an_ended_job_is_free_once_its_record_is_gone(scene: Scene) -> None:
    scene.register("w1")
    scene.job("a").submit("end")
    scene.tick()
    scene.commit()
    scene.r.delete(keys.job(scene.pool, "acme", "a"), keys.result(scene.pool, "acme", "a", 1))
    scene.job("a").update()
    scene.tick()
    assert taken(scene.commit()) == {"a": [1, 2]}


def test_a_job_remembers_when_it_was_last_active(running: Scene) -> None:
    before = running.r.time()[0] * 1000
    assert running.r.hget(keys.job(running.pool, "acme", "a"), "active_ms") is None
    running.commit()
    assert before <= int(field(running, "a", "active_ms")) <= running.r.time()[0] * 1000 + 1000
