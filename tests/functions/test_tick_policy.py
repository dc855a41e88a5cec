"""tick against the pure policy: the same table of cases, and random pools, select the same in the same order."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from mainspring_broker import keys
from mainspring_clock import policy
from mainspring_clock.policy import Fair, Header, Worker, place, select
from tests.helpers import Job, Scene
from tests.policy_cases import CASES, Case, Cycle, JobName

OPS = ["init", "forward", "forward_backward", "forward_backward", "optim_step", "save_weights"]


def one_cycle(scene: Scene, budget: int) -> Cycle:
    """A tick and its commit; what ran, in order."""
    if scene.tick(budget=budget).status == "idle":
        return []
    return [(job.job, [header.seq for header in job.requests]) for job in scene.commit().jobs]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(scene: Scene, case: Case) -> None:
    scene.register("w1", slots=100)
    for tenant, _ in case.queues:
        scene.add_tenant(tenant, case.weights.get(tenant, 1.0))
    for (tenant, name), ops in case.queues.items():
        scene.job(name, tenant).submit(*ops)
    assert [one_cycle(scene, case.budget) for _ in case.cycles] == list(case.cycles)
    assert one_cycle(scene, case.budget) == []


class Shadow:
    """The same pool, computed by the pure policy."""

    def __init__(self, weights: Mapping[str, float], workers: Mapping[str, int]) -> None:
        self.weights = dict(weights)
        self.workers = {name: Worker(name, slots) for name, slots in workers.items()}
        self.fair = {name: Fair() for name in workers}
        self.queues: dict[JobName, list[Header]] = {}
        self.vtimes: dict[JobName, float] = {}
        self.homes: dict[JobName, str] = {}

    def submit(self, job: JobName, header: Header) -> None:
        self.queues.setdefault(job, []).append(header)

    def cycle(self, budget: int) -> tuple[dict[str, Cycle], int]:
        """What each worker runs, and how many jobs found no slot."""
        waiting: dict[str, list[str]] = {}
        for tenant, name in sorted(job for job, queue in self.queues.items() if queue and job not in self.homes):
            waiting.setdefault(tenant, []).append(name)
        placed, unplaced = place(waiting, self.workers.values())
        self.homes |= placed
        batches: dict[str, Cycle] = {}
        for name, worker in sorted(self.workers.items()):
            jobs = [
                policy.Job(job[0], job[1], tuple(queue), self.vtimes.get(job, 0.0))
                for job, queue in self.queues.items()
                if queue and self.homes.get(job) == name
            ]
            turns, self.fair[name] = select(self.fair[name], self.weights, jobs, budget)
            for turn in turns:
                job = turn.job.tenant, turn.job.name
                self.vtimes[job] = turn.job.vtime
                del self.queues[job][: len(turn.requests)]
            load = worker.load * 0.9 + sum(turn.tokens for turn in turns) if turns else worker.load
            held = sum(home == name for home in self.homes.values())
            self.workers[name] = Worker(name, worker.slots, held, load)
            batches[name] = [(turn.job.name, [header.seq for header in turn.requests]) for turn in turns]
        return batches, unplaced


@pytest.mark.parametrize("seed", range(15))
def test_random_pools_select_identically(scene: Scene, seed: int) -> None:
    dice = random.Random(seed)
    weights = {f"t{n}": dice.choice([1.0, 1.0, 0.3, 3.0]) for n in range(dice.randint(1, 4))}
    workers = {f"w{n}": dice.randint(1, 6) for n in range(dice.randint(1, 3))}
    budget = dice.randint(20, 200)
    shadow = Shadow(weights, workers)
    for tenant, weight in weights.items():
        scene.add_tenant(tenant, weight)
    for worker, slots in workers.items():
        scene.register(worker, slots=slots)
    jobs: list[Job] = []
    for _ in range(25):
        if len(jobs) < 16 and dice.random() < 0.6:
            jobs.append(scene.job(f"j{len(jobs):02}", dice.choice(sorted(weights))))
        for job in dice.sample(jobs, k=len(jobs) // 2):
            op = dice.choice(OPS)
            tokens = dice.randint(0, 120) if op.startswith("forward") else 0
            job.submit((op, tokens))
            shadow.submit((job.tenant, job.name), Header(job.seq, op, tokens))
        expected, unplaced = shadow.cycle(budget)
        reply = scene.tick(budget=budget)
        assert reply.unplaced == unplaced
        for worker in workers:
            batch = scene.batch(worker)
            found = [] if batch is None else [(j.job, [h.seq for h in j.requests]) for j in batch.jobs]
            assert found == expected[worker]
            if batch is not None:
                scene.commit(worker)
        fair = {name: scene.r.hgetall(keys.worker_fair(scene.pool, name)) for name in workers}
        assert {name: float(fields.get(b"present", 0)) for name, fields in fair.items()} == {
            name: shadow.fair[name].present for name in workers
        }
    assert any(queue for queue in shadow.queues.values()) or jobs


def test_fifty_jobs_with_room_for_eight_get_their_share_within_one(scene: Scene) -> None:
    scene.register("w1", slots=50)
    jobs = [scene.job(f"j{n:02}", f"t{n % 5}") for n in range(50)]
    for job in jobs:
        job.update()
    by_name = {job.name: job for job in jobs}
    for _ in range(50):
        ran = [name for name, _ in one_cycle(scene, budget=80)]
        assert len(ran) == 8
        for name in ran:
            by_name[name].update()
    assert all(abs(int(job.field("updates")) - 50 * 8 / 50) <= 1 for job in jobs)
