"""What the commands share: the connection, options, and errors written for people."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from mainspring_broker.logs import hide_password as hide_password

if TYPE_CHECKING:
    import redis
    from rich.console import Console
    from rich.table import Table

    from mainspring_ops.view import View

DEFAULT_URL = "redis://127.0.0.1:6379/0"

Url = Annotated[
    str,
    typer.Option("--url", envvar="MAINSPRING_URL", help="Redis or Valkey of the pool: redis://…, rediss://…, unix://…"),
]
Pool = Annotated[str, typer.Option("--pool", envvar="MAINSPRING_POOL", help="Name of the pool.")]


class CommandFailed(Exception):
    """A command cannot go on; the message says why and what to do. No traceback is shown."""


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    width = None if os.isatty(1) else int(os.environ.get("COLUMNS", "160"))
    return Console(stderr=stderr, highlight=False, width=width)


def new_table(*columns: str, numbers: Container[str] = ()) -> Table:
    """A table without a frame; the columns in `numbers` are set to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return table


@contextlib.contextmanager
def connect(url: str) -> Iterator[redis.Redis]:
    """A client of a server that answers.

    Raises:
        CommandFailed: a URL that is none, or no server behind it.
    """
    import redis

    try:
        client = redis.Redis.from_url(url, socket_connect_timeout=5, socket_timeout=30)
    except ValueError as error:
        raise CommandFailed(f"{hide_password(url)} is not a Redis URL: {error}") from None
    try:
        client.ping()
        yield client
    except redis.AuthenticationError as error:
        raise CommandFailed(
            f"Redis at {hide_password(url)} refused the login: {error}.\n"
            "Put user and password into the URL: redis://user:password@host:port/0"
        ) from None
    except redis.ConnectionError as error:
        raise CommandFailed(
            f"no Redis at {hide_password(url)} ({error}).\n"
            "Start everything on this machine with `mainspring up`, or name your server with --url or MAINSPRING_URL."
        ) from None
    finally:
        client.close()


@contextlib.contextmanager
def open_view(url: str, pool: str) -> Iterator[View]:
    """A look at one pool that exists.

    Raises:
        CommandFailed: no server, or the server does not know the pool.
    """
    from mainspring_broker import keys
    from mainspring_ops.view import View

    with connect(url) as client:
        if not client.exists(keys.info(pool)):
            raise CommandFailed(
                f"Redis at {hide_password(url)} has no pool {pool!r}: start a clock for it (`mainspring clock --pool {pool}`), "
                "or choose another with --pool or MAINSPRING_POOL."
            )
        yield View(client, pool)


def ago(ms: float) -> str:
    """A span of time in the largest unit that fits: 340 ms, 12 s, 5 min, 3 h, 2 d."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= size:
            return f"{ms / size:.0f} {unit}"
    return f"{ms:.0f} ms"


def count(number: float) -> str:
    """A number short enough for a column: 9400, 12.3k, 4.1M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= max(size, 10_000):
            return f"{number / size:.0f}{unit}" if number >= size * 100 else f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
