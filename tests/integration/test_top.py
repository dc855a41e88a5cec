"""`mainspring top`: what one frame shows, and the live screen on a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from mainspring_ops.cli import app
from mainspring_ops.top import MOST_JOBS, Snapshot, take
from mainspring_ops.view import Cycle, View
from tests.conftest import Server
from tests.helpers import Scene, wait_until


def once(server: Server, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "160")
    done = CliRunner().invoke(app, ["top", "--once", "--url", server.url, "--pool", scene.pool])
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_a_frame_shows_clock_workers_and_jobs(server: Server, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.register("w1")
    scene.lead(name="the-clock")
    job = scene.job("busy").submit("init").update()
    scene.job("idle").submit("init")
    scene.tick()
    scene.commit(failed=[("busy", 2)])
    job.update(tokens=500)
    lines = once(server, scene, monkeypatch)
    assert lines[0].split(" · ") == [f"pool {scene.pool}", "tiny", "clock the-clock", "boundary"]
    assert lines[1].startswith("cycle 1 · ")
    assert lines[1].endswith("backlog 2 requests, 0 bytes")
    rows = {line.split()[1]: line.split() for line in lines if line.startswith("acme")}
    assert rows["busy"][:10] == ["acme", "busy", "open", "w1", "2", "1", "1", "1", "I·FB·O", rows["busy"][9]]
    assert rows["busy"][-1] == "ago"
    assert rows["idle"][4:9] == ["0", "0", "0", "1", "I"]
    worker = next(line.split() for line in lines if line.startswith("w1"))
    assert worker[1:3] == ["ready", "2/8"]


def test_what_is_missing_is_said(server: Server, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.register("w1")
    lines = once(server, scene, monkeypatch)
    assert "clock none: start one" in lines[0]
    assert "no open jobs" in lines
    job = scene.job("waits")
    scene.requeue("w1")
    job.submit("init")
    lines = once(server, scene, monkeypatch)
    assert "1 jobs wait for a slot" in lines[1]
    assert any("no workers: start one" in line for line in lines)


def test_rates_are_those_of_the_last_seconds() -> None:
    def snapshot(now_ms: int) -> Snapshot:
        cycles = [Cycle(n, 1000 * n, 500, 2, 300, (), {}) for n in range(1, 5)]
        return Snapshot("main", now_ms, {}, {}, True, cycles, [], 0, [])

    assert snapshot(5000).rates == (1.0, 300.0)
    assert snapshot(60_000).rates == (0.0, 0.0)
    assert snapshot(13_000).rates == pytest.approx((2 / 10, 600 / 10))  # two cycles have ended within ten seconds


def test_reading_is_bounded_however_many_jobs_there_are(scene: Scene) -> None:
    scene.register("w1")
    view = View(scene.r, scene.pool)

    def commands() -> int:
        before = scene.r.info("stats")["total_commands_processed"]
        take(view)
        return int(scene.r.info("stats")["total_commands_processed"]) - before

    scene.job("j0")
    few = commands()
    for number in range(1, MOST_JOBS + 50):
        scene.create("acme", f"j{number}")
    many = commands()
    assert many - few <= MOST_JOBS + 20
    assert len(take(view).jobs) == MOST_JOBS
    assert take(view).all_jobs == MOST_JOBS + 50


@contextmanager
def on_a_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The command as the foreground process of a terminal of 120 × 30; gives it and the terminal's other end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "mainspring_ops", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(30)
        os.close(ours)


def test_it_is_live_until_ctrl_c_and_leaves_the_screen_as_it_was(server: Server, scene: Scene) -> None:
    scene.register("w1")
    job = scene.job("j1").submit("init")
    with on_a_terminal("top", "--url", server.url, "--pool", scene.pool) as (process, terminal):
        seen = bytearray()

        def shows(text: bytes) -> bool:
            try:
                seen.extend(os.read(terminal, 65536))
            except BlockingIOError:
                pass
            except OSError:  # it has closed its side
                assert text in seen, seen.decode(errors="replace")
            return text in seen

        wait_until(lambda: shows(b"backlog 1 requests"), "the first frame")
        job.update()
        wait_until(lambda: shows(b"backlog 3 requests"), "a later frame")
        os.write(terminal, b"\x03")
        wait_until(lambda: shows(b"\x1b[?1049l"), "the screen is given back")
        assert process.wait(30) == 0
        text = seen.decode(errors="replace")
        assert "\x1b[?25h" in text  # the cursor is back
        assert "Traceback" not in text
        assert "Aborted" not in text
