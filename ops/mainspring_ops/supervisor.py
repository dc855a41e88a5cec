"""Child processes kept alive: started, their output logged, started again when they crash, stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging.handlers import RotatingFileHandler
from pathlib import Path

from mainspring_broker.retry import Backoff

log = logging.getLogger("mainspring.up")

LOG_BYTES = 8 * 2**20  # per child; one older file is kept beside it
STEADY_S = 30.0  # a child that ran this long starts again without delay
STOP_S = 20.0  # time to end in an orderly way before it is killed


@dataclass
class Child:
    """One process and how it is run.

    Attributes:
        name: in messages, and of the log file.
        command: program and arguments.
        env: added to the environment of this process.
        orphan_signal: what the kernel sends it when this process dies without stopping it.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    orphan_signal: signal.Signals = signal.SIGKILL
    process: asyncio.subprocess.Process | None = None
    restarts: int = 0


class Supervisor:
    """Runs children until they are stopped.

    Before `settled` is set, a child that ends is a failed start, told through `failed_start`; later it is started again
    after a growing pause, 10 seconds at most.
    """

    def __init__(self, logs: Path, *, verbose: bool) -> None:
        self.logs = logs
        self.verbose = verbose
        self.settled = False
        self.failed_start: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._children: dict[str, Child] = {}

    def start(self, child: Child) -> None:
        self._children[child.name] = child
        self._tasks[child.name] = asyncio.create_task(self._keep_alive(child), name=child.name)

    async def stop(self, *names: str) -> None:
        """Stop these children together: SIGTERM, and SIGKILL for what is still there after STOP_S."""
        await asyncio.gather(*(self._stop(name) for name in names if name in self._tasks))

    def kill(self) -> None:
        """Kill all at once: the person at the keyboard does not want to wait."""
        for child in self._children.values():
            _signal(child, signal.SIGKILL)

    def log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    async def _keep_alive(self, child: Child) -> None:
        backoff = Backoff(first=0.2, limit=10.0)
        output = _log_file(self.log_path(child.name))
        try:
            while True:
                started = time.monotonic()
                status = await self._run(child, output)
                if not self.settled:
                    if not self.failed_start.done():
                        self.failed_start.set_result(child)
                    return
                if time.monotonic() - started > STEADY_S:
                    backoff.reset()
                pause = backoff.next()
                child.restarts += 1
                log.warning(
                    "%s ended (%s), starting it again in %.1f s; its log: %s",
                    child.name,
                    _describe(status),
                    pause,
                    self.log_path(child.name),
                )
                await asyncio.sleep(pause)
        finally:
            for handler in output.handlers[:]:
                output.removeHandler(handler)
                handler.close()

    async def _run(self, child: Child, output: logging.Logger) -> int:
        leash = [sys.executable, "-m", "mainspring_ops.leash", str(os.getpid()), str(int(child.orphan_signal))]
        child.process = await asyncio.create_subprocess_exec(
            *leash,
            *child.command,
            env={**os.environ, **child.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only us: the order of stopping matters
            limit=2**20,
        )
        assert child.process.stdout is not None
        while True:
            try:
                line = await child.process.stdout.readline()
            except ValueError:  # a line beyond the limit
                continue
            if not line:
                break
            text = line.decode(errors="replace").rstrip()
            output.info(text)
            if self.verbose:
                print(f"{child.name:>9} │ {text}", file=sys.stderr, flush=True)
        return await child.process.wait()

    async def _stop(self, name: str) -> None:
        child, task = self._children.pop(name), self._tasks.pop(name)
        process = child.process
        self.settled = False  # what ends from here on is not started again
        if process is None or process.returncode is not None:
            task.cancel()
        else:
            _signal(child, signal.SIGTERM)
            done, _ = await asyncio.wait([task], timeout=STOP_S)
            if not done:
                log.warning("%s did not end within %.0f s: killing it", name, STOP_S)
                _signal(child, signal.SIGKILL)
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def _describe(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


def _log_file(path: Path) -> logging.Logger:
    logger = logging.Logger(path.stem)
    logger.addHandler(RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8"))
    return logger
