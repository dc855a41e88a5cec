"""`mainspring cycles`: the pool's recent past as a timeline, jobs down, cycles across."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mainspring_ops.terminal import DEFAULT_URL, CommandFailed, Pool, Url, console, count, new_table, open_view

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
LEGEND = "I init · L load · F forward · FB forward_backward · O optim_step · S save · E end"
MAX_ROWS = 40  # more jobs than this are counted, not shown


def cycles(
    url: Url = DEFAULT_URL,
    pool: Pool = "main",
    last: Annotated[
        int | None,
        typer.Option("--last", min=1, max=1000, help="So many finished cycles. Default: 12, in a file 40."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print each cycle as it finishes, until Ctrl-C.")] = False,
    png: Annotated[Path | None, typer.Option("--png", help="Draw a picture into this file (needs matplotlib).")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Draw a picture with details under the pointer into this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a Chrome trace, for ui.perfetto.dev, into this file.")
    ] = None,
) -> None:
    """Show which job did what in the last cycles, with tokens and milliseconds below.

    FB·O in one column is a whole update in one cycle. FB, O and an empty column between them mean that the client
    waited for the forward_backward before it sent the optim_step: submit both first.
    """
    in_files = png or html or trace
    if in_files and follow:
        raise typer.BadParameter("--follow prints; it does not go with --png, --html or --trace")
    with open_view(url, pool) as view:
        history = view.cycles(last or (40 if in_files else 12))
        if in_files:
            write_files(pool, history, png=png, html=html, trace=trace)
            return
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


def write_files(
    pool: str, history: Sequence[Cycle], *, png: Path | None, html: Path | None, trace: Path | None
) -> None:
    """Draw the cycles into each file that is given.

    Raises:
        CommandFailed: there is no cycle yet, or no matplotlib for a PNG.
    """
    from mainspring_ops import chart, chart_html, chart_png
    from mainspring_ops.trace import chrome_trace

    if not history:
        raise CommandFailed(f"pool {pool} has not run any cycle yet: there is nothing to draw")
    layout, title = chart.lay_out(history), f"pool {pool} · cycles {history[0].number} to {history[-1].number}"
    if png:
        chart_png.write_png(layout, title, png)
    if html:
        html.write_text(chart_html.html(layout, title), "utf-8")
    if trace:
        trace.write_text(chrome_trace(pool, history), "utf-8")
    for path in filter(None, (png, html, trace)):
        console().print(f"{len(history)} cycles in {path}", soft_wrap=True)


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
