"""A server that is killed and comes back with its append-only file: nothing that was answered is lost."""

from __future__ import annotations

from mainspring_broker import library
from tests.conftest import Server
from tests.helpers import Scene, taken


def test_requests_batches_and_results_survive_kill_9_at_every_step(own_server: Server, pool: str) -> None:
    scene = Scene(own_server.client(), pool)
    library.load(scene.r)
    scene.register("w1")
    job = scene.job().update().update()

    own_server.restart()
    assert job.stream() == [1, 2, 3, 4]
    assert scene.tick().status == "started"

    own_server.restart()
    assert scene.tick().status == "running"
    assert taken(scene.batch()) == {"j1": [1, 2]}
    scene.commit()

    own_server.restart()
    assert job.field("done_seq") == "2"
    assert len(scene.history()) == 1
    assert scene.tick().cycle == 2
    assert taken(scene.commit()) == {"j1": [3, 4]}
    assert job.update().seq == 6  # the chain goes on
