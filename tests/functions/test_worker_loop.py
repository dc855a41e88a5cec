"""The worker's loop on a real server, with an engine that only counts: no batch runs twice, and none is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from mainspring_broker.errors import LibraryMissing, StateLost
from mainspring_workers.engine import Engine, Outcome, WorkItem
from mainspring_workers.loop import Worker
from mainspring_workers.settings import WorkerSettings
from tests.helpers import Job, Scene


class CountingEngine:
    """Copies that are only a number: how many updates they have seen."""

    def __init__(self) -> None:
        self.facts = {
            "base_model": "tiny", "base_model_path": "models/tiny", "vocab_size": 100, "max_length": 64,
            "device": "cpu", "dtype": "float32", "storage": "unused",
        }  # fmt: skip
        self.updates: dict[str, int] = {}

    def has(self, job: str) -> bool:
        return job in self.updates

    def drop(self, job: str) -> None:
        self.updates.pop(job, None)

    def run(self, items: Sequence[WorkItem]) -> list[Outcome]:
        return [self._run(item) for item in items]

    def _run(self, item: WorkItem) -> Outcome:
        if item.op == "init":
            self.updates[item.job] = 0
        elif item.job not in self.updates:
            return Outcome(item.job, item.seq, None, StateLost("not here"))
        elif item.op == "optim_step":
            self.updates[item.job] += 1
        return Outcome(item.job, item.seq, {}, None)


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def worker(scene: Scene, engine: CountingEngine) -> Worker:
    settings = WorkerSettings(pool=scene.pool, worker="w1", slots=2)
    made = Worker(settings, scene.r, cast(Engine, engine))
    made._register()
    return made


def outcomes(job: Job) -> list[str]:
    return [fields[b"outcome"].decode() for _, fields in job.scene.r.xrange(job.key + ":outcomes")]


def serve(worker: Worker, scene: Scene) -> None:
    assert scene.tick().status == "started"
    worker._serve_one()


def opened(worker: Worker, scene: Scene, name: str = "j1") -> Job:
    job = scene.job(name).submit("init")
    serve(worker, scene)
    return job


def test_a_commit_waits_for_the_library(worker: Worker, scene: Scene, engine: CountingEngine, monkeypatch: Any) -> None:
    """FUNCTION FLUSH while the worker computes: the update is applied once and not lost."""
    job = opened(worker, scene).update()
    real, failures = worker._commit.__globals__["functions"].run, iter([True, False])

    def run(client: Any, call: Any) -> Any:
        if call.name == "ms_commit" and next(failures):
            raise LibraryMissing("flushed")
        return real(client, call)

    monkeypatch.setattr("mainspring_workers.loop.functions.run", run)
    serve(worker, scene)
    assert engine.updates == {"acme/j1": 1}
    assert outcomes(job) == ["ok"] * 3


def test_a_batch_whose_commit_is_unknown_never_runs_on_the_same_copy_again(
    worker: Worker, scene: Scene, engine: CountingEngine, monkeypatch: Any
) -> None:
    job = opened(worker, scene).update()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_commit", lambda *_: (_ for _ in ()).throw(RuntimeError("on the way")))
        with pytest.raises(RuntimeError):
            serve(worker, scene)
    worker._serve_one()
    assert engine.updates == {}
    assert outcomes(job) == ["ok", "state_lost", "state_lost"]


def test_a_commit_that_redis_forgot_does_not_stop_the_pool(worker: Worker, scene: Scene) -> None:
    """Redis comes back from its last second with the batch and without its commit."""
    job = opened(worker, scene).update()
    scene.tick()
    before = [(key, max(scene.r.pttl(key), 0), scene.r.dump(key)) for key in scene.r.scan_iter()]
    worker._serve_one()
    assert job.field("done_seq") == "3"
    scene.r.flushdb()
    for entry in before:
        scene.r.restore(*entry)
    assert job.field("done_seq") == "1"
    for _ in range(3):  # it sees no new batch, looks at the old ones, and finds the one that is waited for
        worker._serve_one()
    assert job.field("done_seq") == "3"
    assert outcomes(job) == ["ok", "state_lost", "state_lost"]  # its copy is ahead of what the service remembers


def test_copies_of_jobs_that_moved_away_make_room(worker: Worker, scene: Scene, engine: CountingEngine) -> None:
    """The worker was silent for too long: its jobs went to another one, and did not come back."""
    jobs = [opened(worker, scene, name) for name in ("j1", "j2")]
    scene.requeue("w1")
    scene.register("w2", slots=2)
    for job in jobs:
        job.submit("end")
    scene.tick()
    scene.commit("w2")
    scene.requeue("w2")
    worker._register()
    opened(worker, scene, "j3")
    assert set(engine.updates) == {"acme/j3"}
