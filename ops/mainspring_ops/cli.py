"""The `mainspring` command: one small module for each sub-command, loaded only when it runs.

Nothing here imports torch, redis or the other processes, so that `mainspring --help` answers at once.
"""

from __future__ import annotations

import sys

import typer

from mainspring_ops import cycles, demo, doctor, end, health, inspect_key, jobs, run, tenants, top, up, workers
from mainspring_ops.terminal import CommandFailed

app = typer.Typer(
    help="Mainspring: a self-hosted, multi-tenant LoRA training service that runs on clock cycles.",
    epilog="Start with `mainspring up`. Every setting is also an environment variable: docs/settings.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("up")(up.up)
app.command("demo")(demo.demo)
app.command("clock")(run.clock)
app.command("worker")(run.worker)
app.command("jobs")(jobs.jobs)
app.command("end")(end.end)
app.command("cycles")(cycles.cycles)
app.command("inspect")(inspect_key.inspect)
app.command("workers")(workers.workers)
app.command("top")(top.top)
app.add_typer(tenants.app, name="tenants")
app.command("doctor")(doctor.doctor)
app.add_typer(health.app, name="health")


def main() -> None:
    """Entry of the command. What goes wrong is said in words, without a traceback, with exit status 1."""
    try:
        app()
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        typer.echo(f"mainspring: {message}", err=True)
        sys.exit(1)


def explain(error: Exception) -> str | None:
    """The error in words for a person, or None when it is a fault of ours that wants a traceback."""
    if isinstance(error, CommandFailed | OSError):  # OSError: a folder, a port, or a base model that cannot be read
        return str(error)
    from pydantic import ValidationError
    from redis.exceptions import RedisError

    from mainspring_broker.errors import MainspringError

    if isinstance(error, MainspringError):
        return f"{error.message} [{error.code}]"
    if isinstance(error, ValidationError):
        return "\n".join(
            f"MAINSPRING_{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}, got {e['input']!r}" for e in error.errors()
        )
    if isinstance(error, RedisError):
        return f"Redis: {error}"
    return None
