"""The key-leak check of conftest.py itself: what it must find."""

from __future__ import annotations

import pytest

from mainspring_broker import keys
from tests.conftest import leaks
from tests.helpers import Scene


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (("SET", "stray", "1"), "not in the schema"),
        (("SET", "ms:{p}:unheard-of", "1", "PX", "60000"), "not in the schema"),
        (("SET", "ms:{p}:lease", "1"), "no time to live"),
        (("SET", "ms:{p}:bell", "1"), "a string, the schema says list"),
        (("SET", "ms:{p}:t:a:job:j:result:1", "1"), "no time to live"),
        (("RPUSH", "ms:{p}:t:a:job:j:queue", "1"), "though its job has ended"),
        (("HSET", "ms:{p}:t:a:job:j", "state", "ended"), "though its job has ended"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else value,
)
def test_a_leak_is_found(scene: Scene, command: tuple[str, ...], found: str) -> None:
    scene.r.execute_command(*command)
    assert any(found in leak for leak in leaks(scene.r))
    scene.r.flushall()


def test_a_pool_at_work_leaks_nothing(scene: Scene) -> None:
    scene.register("w1")
    scene.job("a").update()
    scene.job("b").update().submit("end")
    scene.tick()
    assert leaks(scene.r) == []
    scene.commit()
    assert leaks(scene.r) == []
    assert scene.r.exists(keys.cycles(scene.pool))
