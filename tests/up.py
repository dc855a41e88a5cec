"""`mainspring up` as a real process for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from tests.helpers import wait_until

START_S = 150  # a worker imports torch on a busy machine


def command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "mainspring_ops", "up", "--dir", str(folder / "data"), "--port", "0", *options]


@contextmanager
def up(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`mainspring up` with its output in folder/out."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAINSPRING_")}
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(
            command(folder, *options),
            env=environment,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=folder,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def url_of(folder: Path) -> str:
    """The URL that a ready `up` has printed, "" before that."""
    lines = (folder / "out").read_text().splitlines()
    return next((line.partition("=")[2] for line in lines if line.startswith("export MAINSPRING_URL=")), "")


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that work in this folder: `up` and all of its children do."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            inside = (entry / "cwd").readlink().is_relative_to(folder)
            ended = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if inside and not ended:
            found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def started(folder: Path, process: subprocess.Popen[str]) -> redis.Redis:
    def ready() -> str:
        assert process.poll() is None, (folder / "out").read_text()
        return url_of(folder)

    return redis.Redis.from_url(str(wait_until(ready, "`mainspring up` is ready", timeout=START_S)))
