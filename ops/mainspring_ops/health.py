"""`mainspring health`: does the clock or the worker of this host live? For health checks of containers and services.

A process that hangs shows no sign of life, so this is more than that it runs. It reads a few keys and loads nothing heavy.
"""

from __future__ import annotations

import socket

import typer

from mainspring_ops.terminal import DEFAULT_URL, CommandFailed, Pool, Url, ago, connect, console

SILENT_MS = 10_000

app = typer.Typer(help="Exit status 0 when the clock or worker of this host lives.", no_args_is_help=True)


@app.command("clock")
def clock(url: Url = DEFAULT_URL, pool: Pool = "main") -> None:
    """A clock of this host leads the pool or stands by, and has said so within two leases."""
    from mainspring_broker import keys

    host = socket.gethostname()
    with connect(url) as client:
        listed: list[bytes] = client.zrange(keys.clocks(pool), 0, -1)  # type: ignore[assignment]
    names = [name.decode() for name in listed]
    _say([name for name in names if name.rpartition("-")[0] == host], f"clock of host {host} is on the list", pool)


@app.command("worker")
def worker(url: Url = DEFAULT_URL, pool: Pool = "main") -> None:
    """A worker of this host is registered, and its last heartbeat is less than 10 seconds old."""
    from mainspring_ops.view import View

    host = socket.gethostname()
    with connect(url) as client:
        alive = [worker for worker in View(client, pool).workers() if worker.silent_ms < SILENT_MS]
    names = [worker.name for worker in alive if worker.fields.get("host") == host]
    _say(names, f"worker of host {host} has shown a heartbeat within {ago(SILENT_MS)}", pool)


def _say(names: list[str], what: str, pool: str) -> None:
    if not names:
        raise CommandFailed(f"no {what} (pool {pool})")
    console().print(f"{', '.join(names)} lives", markup=False, soft_wrap=True)
