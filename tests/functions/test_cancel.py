"""cancel: mark what has not started."""

from __future__ import annotations

import pytest

from mainspring_broker.functions import Header
from tests.helpers import Job, Scene


@pytest.fixture
def job(scene: Scene) -> Job:
    scene.register("w1")
    return scene.job("j1").update().update()


def test_a_cancelled_request_keeps_its_place_and_costs_nothing(job: Job) -> None:
    assert job.cancel(3)
    assert job.queue() == [
        "1 forward_backward 10",
        "2 optim_step 0",
        "3 forward_backward 0 cancelled",
        "4 optim_step 0",
    ]
    assert job.stream() == [1, 2, 3, 4]


def test_cancelling_twice_is_as_good_as_once(job: Job) -> None:
    assert job.cancel(3)
    queue = job.queue()
    assert job.cancel(3)
    assert job.queue() == queue


def test_a_request_in_flight_cannot_be_cancelled(job: Job) -> None:
    job.scene.tick()
    assert not job.cancel(1)
    assert not job.cancel(2)
    assert job.cancel(3)
    assert job.queue()[0] == "1 forward_backward 10"


def test_a_finished_request_cannot_be_cancelled(job: Job) -> None:
    job.scene.tick()
    job.scene.commit()
    assert not job.cancel(1)
    assert job.cancel(3)
    assert job.queue() == ["3 forward_backward 0 cancelled", "4 optim_step 0"]


@pytest.mark.parametrize("seq", [0, 5, 1000])
def test_what_was_never_accepted_cannot_be_cancelled(job: Job, seq: int) -> None:
    before = job.scene.everything()
    assert not job.cancel(seq)
    assert job.scene.everything() == before


def test_another_writer_cannot_cancel(job: Job) -> None:
    assert not job.cancel(1, writer="somebody-else")
    assert job.queue()[0] == "1 forward_backward 10"


def test_the_end_of_a_job_is_not_taken_back(job: Job) -> None:
    job.submit("end")
    assert not job.cancel(5)


def test_a_job_that_does_not_exist_has_nothing_to_cancel(scene: Scene) -> None:
    assert not Job(scene, "acme", "none", "w").cancel(1)


def test_what_a_lost_worker_had_in_hand_can_be_cancelled_again(job: Job) -> None:
    job.scene.tick()
    assert not job.cancel(1)
    job.scene.requeue("w1")
    assert job.cancel(1)
    job.scene.register("w2")
    job.scene.tick()
    batch = job.scene.batch("w2")
    assert batch is not None
    assert batch.jobs[0].requests == (Header(1, "forward_backward", 0, True), Header(2, "optim_step", 0, False))
