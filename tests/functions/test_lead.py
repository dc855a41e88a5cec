"""lead, resign: one clock at a time."""

from __future__ import annotations

from mainspring_broker import keys
from tests.helpers import Scene, wait_until


def test_the_first_clock_leads_and_a_second_does_not(scene: Scene) -> None:
    assert scene.lead("a", name="clock-a")
    assert not scene.lead("b", name="clock-b")
    assert scene.clock("leader") == "clock-a"
    assert scene.r.get(keys.lease(scene.pool)) == b"a"


def test_a_leader_keeps_its_lease_by_asking_again(scene: Scene) -> None:
    scene.lead("a", lease_ms=1000)
    since = scene.clock("leads_since_ms")
    assert scene.lead("a", lease_ms=60_000)
    assert 1000 < scene.r.pttl(keys.lease(scene.pool)) <= 60_000
    assert scene.clock("leads_since_ms") == since


def test_the_standby_takes_over_when_the_lease_runs_out(scene: Scene) -> None:
    scene.lead("a", lease_ms=50, name="clock-a")
    wait_until(lambda: scene.lead("b", name="clock-b"), "the lease of a dead clock runs out")
    assert scene.clock("leader") == "clock-b"
    assert not scene.lead("a")


def test_a_resigned_lease_is_free_at_once_and_the_bell_rings(scene: Scene) -> None:
    scene.lead("a")
    assert scene.resign("a")
    assert scene.r.lrange(keys.bell(scene.pool), 0, -1) == [b"1"]
    assert scene.lead("b")


def test_a_clock_cannot_resign_for_another(scene: Scene) -> None:
    scene.lead("a")
    assert not scene.resign("b")
    assert scene.r.get(keys.lease(scene.pool)) == b"a"
    assert not scene.r.exists(keys.bell(scene.pool))


def test_nobody_resigns_a_lease_that_has_run_out(scene: Scene) -> None:
    assert not scene.resign("a")


def test_clocks_that_live_are_on_the_list_and_the_dead_drop_off(scene: Scene) -> None:
    def listed() -> list[bytes]:
        return sorted(scene.r.zrange(keys.clocks(scene.pool), 0, -1))

    scene.lead("a", lease_ms=60_000, name="clock-a")
    scene.lead("b", lease_ms=60_000, name="clock-b")
    assert listed() == [b"clock-a", b"clock-b"]
    scene.resign("b", name="clock-b")
    assert listed() == [b"clock-a"]
    scene.r.zincrby(keys.clocks(scene.pool), -120_001, "clock-a")  # silent for more than two leases
    scene.lead("b", lease_ms=60_000, name="clock-b")
    assert listed() == [b"clock-b"]
    assert 60_000 < scene.r.pttl(keys.clocks(scene.pool)) <= 120_000
