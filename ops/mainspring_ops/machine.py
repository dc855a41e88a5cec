"""One machine that runs the whole service: which processes there are, when they are ready, in which order they stop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from mainspring_broker import keys
from mainspring_ops.embedded import choose_port, server_command
from mainspring_ops.supervisor import Child, Supervisor
from mainspring_ops.terminal import CommandFailed, connect, console, hide_password

POLL_S = 0.05
SILENT_S = 15.0  # of waiting, before it is said
READY_S = 300.0  # a large base model takes its time to load
TAIL_LINES = 15

PROGRAM = """\
import mainspring as trio
client = trio.ServiceClient().create_lora_training_client({base_model!r}, rank=8)
ids = client.get_tokenizer().encode("Every cycle is one piece of work from many jobs.")
datum = trio.Datum(trio.ModelInput.from_ints(ids[:-1]), {{"target_tokens": ids[1:]}})
loss, step = client.forward_backward([datum], "cross_entropy"), client.optim_step(trio.AdamParams(learning_rate=1e-3))
print(loss.result().metrics, step.result().metrics, "in cycle", step.cycle)"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run, and where."""

    workers: int
    base_model: str
    folder: Path  # absolute
    port: int | None  # of the embedded server; None: the default or a free one, 0: a free one
    maxmemory: str
    url: str | None  # of a server that runs already; None: an embedded one
    pool: str
    verbose: bool


class Machine:
    """`run` starts everything and returns the exit status after it has stopped."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.worker_names = [f"worker-{number}" for number in range(1, plan.workers + 1)]

    async def run(self) -> int:
        """Run until SIGINT, SIGTERM or SIGHUP; a second one kills everything at once.

        Raises:
            CommandFailed: the folder is in use, no server, or a process that does not come up.
        """
        plan = self.plan
        logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        for name in ("valkey", "adapters", "logs"):
            (plan.folder / name).mkdir(parents=True, exist_ok=True)
        with _alone(plan.folder):
            supervisor = Supervisor(plan.folder / "logs", verbose=plan.verbose)
            stopping = _stop_event(supervisor)
            try:
                url = await self._start(supervisor, stopping)
                if not stopping.is_set():
                    supervisor.settled = True
                    self._welcome(url)
                    await stopping.wait()
            finally:
                console(stderr=True).print("stopping …", style="dim")
                await supervisor.stop("clock", *self.worker_names)
                await supervisor.stop("valkey")
        return 0

    async def _start(self, supervisor: Supervisor, stopping: asyncio.Event) -> str:
        plan = self.plan
        if plan.url is None:
            port = choose_port(plan.port)
            url = f"redis://127.0.0.1:{port}/0"
            command = server_command(plan.folder / "valkey", port, plan.maxmemory)
            supervisor.start(Child("valkey", command, orphan_signal=signal.SIGTERM))
        else:
            url = plan.url
            with connect(url):
                pass
        async with redis.asyncio.Redis.from_url(url) as client:

            async def answers() -> bool:
                return bool(await client.ping())

            await self._until(answers, "the server answers", supervisor, stopping)
            if stopping.is_set():
                return url
            seconds, micros = await client.time()
            since_ms = int(seconds) * 1000 + int(micros) // 1000
            for child in self._children(url):
                supervisor.start(child)

            async def ready() -> bool:
                return await self._pool_is_ready(client, since_ms)

            await self._until(ready, "the pool is ready", supervisor, stopping)
        return url

    def _children(self, url: str) -> list[Child]:
        plan, this = self.plan, [sys.executable, "-m", "mainspring_ops"]
        threads = max(1, len(os.sched_getaffinity(0)) // plan.workers) if hasattr(os, "sched_getaffinity") else 0
        shared = {"MAINSPRING_URL": url, "MAINSPRING_POOL": plan.pool, "PYTHONUNBUFFERED": "1"}
        of_workers = {
            **shared,
            "MAINSPRING_BASE_MODEL": plan.base_model,
            "MAINSPRING_STORAGE": str(plan.folder / "adapters"),
            "MAINSPRING_THREADS": os.environ.get("MAINSPRING_THREADS", str(threads)),
        }
        metrics = int(os.environ.get("MAINSPRING_METRICS_PORT") or 0)  # of the clock; the workers have the next ones
        workers = [
            Child(
                name,
                [*this, "worker", "--name", name],
                {**of_workers, "MAINSPRING_METRICS_PORT": str(metrics + number if metrics else 0)},
            )
            for number, name in enumerate(self.worker_names, 1)
        ]
        return [Child("clock", [*this, "clock"], shared), *workers]

    async def _pool_is_ready(self, client: redis.asyncio.Redis, since_ms: int) -> bool:
        """A clock leads, and each of our workers has registered since we started it."""
        pool = self.plan.pool
        if not await client.exists(keys.lease(pool)):
            return False
        for name in self.worker_names:
            state, registered = await client.hmget(keys.worker(pool, name), "state", "registered_ms")
            if state != b"ready" or int(registered or 0) < since_ms:
                return False
        return True

    async def _until(
        self, condition: Callable[[], Awaitable[bool]], what: str, supervisor: Supervisor, stopping: asyncio.Event
    ) -> None:
        """Return when the condition holds or we are asked to stop.

        Raises:
            CommandFailed: a process ended meanwhile, or READY_S went by.
        """
        begun = asyncio.get_running_loop().time()
        deadline, told = begun + READY_S, False
        while not stopping.is_set():
            if supervisor.failed_start.done():
                child = supervisor.failed_start.result()
                path = supervisor.log_path(child.name)
                raise CommandFailed(f"{child.name} did not start. The end of {path}:\n{_tail(path)}")
            with contextlib.suppress(RedisError):  # not listening yet, or still loading its data
                if await condition():
                    return
            if not told and asyncio.get_running_loop().time() - begun > SILENT_S:
                told = True
                console(stderr=True).print(
                    f"waiting until {what}; what each process does: {supervisor.logs}", style="dim"
                )
            if asyncio.get_running_loop().time() > deadline:
                raise CommandFailed(f"waited {READY_S:.0f} s until {what}; see the logs in {supervisor.logs}")
            await asyncio.sleep(POLL_S)

    def _welcome(self, url: str) -> None:
        plan, out = self.plan, console()
        count = f"{plan.workers} worker{'s' if plan.workers > 1 else ''}"
        from rich.panel import Panel

        out.print(
            Panel.fit(
                f"[bold]Mainspring is running[/]: pool {plan.pool} · {plan.base_model} · {count}\n"
                f"data, adapters and logs: {plan.folder}\n"
                "look: mainspring jobs · mainspring cycles · mainspring workers       stop: Ctrl-C",
                border_style="green",
            )
        )
        out.print(f"export MAINSPRING_URL={hide_password(url)}", markup=False, soft_wrap=True)
        if plan.pool != "main":
            out.print(f"export MAINSPRING_POOL={plan.pool}", markup=False, soft_wrap=True)
        out.print(f"\n{PROGRAM.format(base_model=plan.base_model)}\n", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock.

    Raises:
        CommandFailed: another `mainspring up` holds it.
    """
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CommandFailed(f"another `mainspring up` runs in {folder}: stop it, or choose another --dir") from None
        yield


def _stop_event(supervisor: Supervisor) -> asyncio.Event:
    stopping = asyncio.Event()

    def ask() -> None:
        if stopping.is_set():
            supervisor.kill()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ask)
    return stopping


def _tail(path: Path) -> str:
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])
