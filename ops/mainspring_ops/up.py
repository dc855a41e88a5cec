"""`mainspring up`: the whole service on one machine: Valkey, a clock and workers, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mainspring_ops.terminal import Pool


def up(
    workers: Annotated[int, typer.Option("--workers", min=1, max=64, help="Worker processes.")] = 1,
    base_model: Annotated[
        str, typer.Option(envvar="MAINSPRING_BASE_MODEL", help="A shipped name, a folder, or a Hugging Face id.")
    ] = "mainspring-tiny",
    folder: Annotated[Path, typer.Option("--dir", help="Where data, adapters and logs go; kept between runs.")] = Path(
        "mainspring-data"
    ),
    port: Annotated[
        int | None, typer.Option(help="Of the embedded Valkey; 0: any free one. [default: 7379, or a free one]")
    ] = None,
    maxmemory: Annotated[str, typer.Option(help="Of the embedded Valkey: 512mb, 4gb, …")] = "2gb",
    url: Annotated[str | None, typer.Option("--url", help="Use this running Redis or Valkey instead.")] = None,
    pool: Pool = "main",
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what all processes log, not only their files.")
    ] = False,
) -> None:
    """Run everything on this machine until Ctrl-C.

    Starts an embedded Valkey (appended to disk), a clock and the workers, and says when the pool is ready. A process
    that crashes is started again. Saved adapters, tenants, results and the history stay in --dir for the next run; what
    open jobs have not saved is lost with their worker. Two at the same time need two folders.
    """
    import asyncio

    from mainspring_ops.machine import Machine, Plan

    plan = Plan(
        workers=workers,
        base_model=base_model,
        folder=folder.absolute(),
        port=port,
        maxmemory=maxmemory,
        url=url,
        pool=pool,
        verbose=verbose,
    )
    raise typer.Exit(asyncio.run(Machine(plan).run()))
