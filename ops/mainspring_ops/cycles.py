"""`mainspring cycles`: the pool's recent past as a timeline, jobs down, cycles across."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from mainspring_ops.terminal import DEFAULT_URL, Pool, Url, console, count, new_table, open_view

if TYPE_CHECKING:
    from rich.table import Table

    from mainspring_ops.view import Cycle

LETTERS = {
    "init": "I",
    "load_state": "L",
    "forward": "F",
    "forward_backward": "FB",
    "optim_step": "O",
    "save_state": "S",
    "save_weights": "S",
    "end": "E",
}
LEGEND = "I init · F forward · FB forward_backward · O optim_step · S save · E end"
MAX_ROWS = 40  # more jobs than this are counted, not shown


def cycles(
    url: Url = DEFAULT_URL,
    pool: Pool = "main",
    last: Annotated[int, typer.Option("--last", min=1, max=1000, help="Show so many finished cycles.")] = 12,
    follow: Annotated[bool, typer.Option("--follow", help="Print each cycle as it finishes, until Ctrl-C.")] = False,
) -> None:
    """Show which job did what in the last cycles, with tokens and milliseconds below.

    FB·O in one column is a whole update in one cycle. FB, O and an empty column between them mean that the client
    waited for the forward_backward before it sent the optim_step: submit both first.
    """
    with open_view(url, pool) as view:
        history = view.cycles(last)
        if not history:
            console().print(f"pool {pool} has not run any cycle yet")
        elif not follow:
            console().print(timeline(history), LEGEND, sep="\n")
        if not follow:
            return
        for cycle in history:
            console().print(line(cycle))
        number = history[-1].number if history else 0
        while True:
            for cycle in view.cycles_after(number, wait_ms=1000):
                console().print(line(cycle))
                number = cycle.number


def timeline(history: Sequence[Cycle]) -> Table:
    """Rows are jobs by first appearance, columns are cycles."""
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for cycle in history:
        for part in cycle.parts:
            cells.setdefault((part.tenant, part.job), {})[cycle.number] = short(part.ops)
    table = new_table("cycle")
    for cycle in history:
        table.add_column(str(cycle.number), justify="center", no_wrap=True)
    for (tenant, job), row in list(cells.items())[:MAX_ROWS]:
        table.add_row(f"{tenant}/{job}", *(row.get(cycle.number, "") for cycle in history))
    if len(cells) > MAX_ROWS:
        table.add_row(f"… {len(cells) - MAX_ROWS} more jobs")
    table.add_section()
    table.add_row("tokens", *(count(cycle.tokens) for cycle in history), style="dim")
    table.add_row("ms", *(str(cycle.ms) for cycle in history), style="dim")
    return table


def short(ops: Sequence[str]) -> str:
    """Operations in a few letters: ("forward_backward", "forward_backward", "optim_step") is FB×2·O."""
    runs = [(op, len(list(group))) for op, group in groupby(ops)]
    return "·".join(LETTERS.get(op, op) + (f"×{times}" if times > 1 else "") for op, times in runs)


def line(cycle: Cycle) -> str:
    """One cycle on one line."""
    parts = "  ".join(f"{part.tenant}/{part.job} {short(part.ops)}" for part in cycle.parts[:MAX_ROWS])
    more = f"  … {len(cycle.parts) - MAX_ROWS} more" if len(cycle.parts) > MAX_ROWS else ""
    return f"{cycle.number:>6}  {cycle.ms:>5} ms  {count(cycle.tokens):>6} tok  {parts}{more}"
