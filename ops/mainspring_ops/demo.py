"""`mainspring demo`: four people fine-tune on four kinds of text at once, each with a loop of another shape."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the run's data and adapters go; made anew.")] = Path(
        "demo-out"
    ),
    cycles: Annotated[
        int,
        typer.Option(min=4, max=4000, help="About how many cycles to train; each client makes of them what it can."),
    ] = 120,
) -> None:
    """Train four adapters at once on the shipped model, then show what each has learnt and how the cycles went.

    Starts a service of its own (`mainspring up`) and stops it at the end. Four clients train on four kinds of text
    from Python's standard library: one awaits every request, one submits both requests of an update first, one looks
    ahead by one batch, one accumulates gradients. The adapters stay in --dir, in PEFT's format.
    """
    import asyncio

    from mainspring_ops.demo_run import run_demo

    raise typer.Exit(asyncio.run(run_demo(folder.absolute(), cycles)))
