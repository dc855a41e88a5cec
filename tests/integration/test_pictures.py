"""`mainspring cycles --png --html --trace`: what is written of a pool's history, and what is said instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mainspring_ops.cli import app
from tests.conftest import Server
from tests.helpers import Scene


def call(server: Server, scene: Scene, *words: str | Path):
    return CliRunner().invoke(app, ["cycles", "--url", server.url, "--pool", scene.pool, *map(str, words)])


def test_all_three_are_written_at_once(server: Server, scene: Scene, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scene.register()
    job = scene.job("j1").submit("init")
    for _ in range(3):
        job.update()
        scene.tick()
        scene.commit()
    png, html, trace = tmp_path / "p.png", tmp_path / "p.html", tmp_path / "p.json"
    done = call(server, scene, "--png", png, "--html", html, "--trace", trace)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [f"3 cycles in {path}" for path in (png, html, trace)]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "cycles 1 to 3" in html.read_text("utf-8")
    assert '"boundary 3"' in trace.read_text("utf-8")


def test_files_and_follow_do_not_go_together(server: Server, scene: Scene, tmp_path: Path) -> None:
    done = call(server, scene, "--html", tmp_path / "p.html", "--follow")
    assert done.exit_code == 2
    assert "--follow" in done.output


def test_an_empty_history_is_said_and_nothing_is_written(server: Server, scene: Scene, tmp_path: Path) -> None:
    scene.register()
    done = call(server, scene, "--html", tmp_path / "p.html")
    assert done.exit_code == 1
    assert "nothing to draw" in str(done.exception)
    assert not (tmp_path / "p.html").exists()
