"""`mainspring top`: the whole pool on one screen, twice a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mainspring_ops.cycles import short
from mainspring_ops.terminal import DEFAULT_URL, Pool, Url, ago, console, count, new_table, open_view

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from mainspring_ops.view import Cycle, Job, View, Worker

PERIOD_S = 0.5
RECENT_CYCLES = 64  # what rates and "last cycle" are taken from
RATE_MS = 10_000  # and no more than so long ago
MOST_JOBS = 500  # looked at; the screen shows the most active ones
ACTIVE_MS = 5000  # a job that ran so recently is shown before the others
SILENT_MS = 3000  # a heartbeat this old is worth a colour


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pool at one moment."""

    pool: str
    now_ms: int
    info: dict[str, str]
    clock: dict[str, str]
    leads: bool  # a clock holds the lease
    cycles: Sequence[Cycle]  # the last ones, oldest first
    jobs: Sequence[Job]
    all_jobs: int  # those that were not looked at among them
    workers: Sequence[Worker]

    @property
    def rates(self) -> tuple[float, float]:
        """Cycles and tokens per second of the last cycles; 0 when the pool has done nothing for a while."""
        recent = [cycle for cycle in self.cycles if self.now_ms - cycle.started_ms - cycle.ms <= RATE_MS]
        if not recent:
            return 0.0, 0.0
        seconds = max(self.now_ms - recent[0].started_ms, 1) / 1000
        return len(recent) / seconds, sum(cycle.tokens for cycle in recent) / seconds


def top(
    url: Url = DEFAULT_URL,
    pool: Pool = "main",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Watch the pool: clock, workers and jobs, until Ctrl-C. Not on a terminal it prints one frame.

    queued: accepted requests that have not run. last cycle: what the job did when it ran last, and in which cycle.
    """
    from rich.live import Live

    out = console()
    with open_view(url, pool) as view:
        if once or not sys.stdout.isatty():
            snapshot = take(view)
            out.print(frame(snapshot, rows=len(snapshot.jobs)))
            return
        try:
            with Live(console=out, screen=True, auto_refresh=False, transient=True) as live:
                while True:
                    snapshot = take(view)
                    room = out.height - len(snapshot.workers) - 9
                    live.update(frame(snapshot, rows=max(room, 3)), refresh=True)
                    time.sleep(PERIOD_S)
        except KeyboardInterrupt:
            return


def take(view: View) -> Snapshot:
    """Read everything that a frame shows; a fixed number of reads, each bounded."""
    return Snapshot(
        pool=view.pool,
        now_ms=view.now_ms(),
        info=view.info(),
        clock=view.clock(),
        leads=view.has_leader(),
        cycles=view.cycles(RECENT_CYCLES),
        jobs=view.jobs(limit=MOST_JOBS),
        all_jobs=sum(tenant.jobs for tenant in view.tenants()),
        workers=view.workers(),
    )


def frame(snapshot: Snapshot, rows: int) -> Group:
    """One screen with at most `rows` jobs, the active ones first."""
    from rich.console import Group

    parts: list[RenderableType] = [*_head(snapshot), "", _workers(snapshot), "", _jobs(snapshot, rows)]
    if (more := snapshot.all_jobs - min(rows, len(snapshot.jobs))) > 0:
        parts.append(f"[dim]and {more} more jobs[/]")
    return Group(*parts)


def _head(s: Snapshot) -> list[str]:
    leader = s.clock.get("leader", "?") if s.leads else "[red]none: start one with `mainspring clock`[/]"
    cycles_a_second, tokens_a_second = s.rates
    queued, size = sum(job.queued for job in s.jobs), sum(job.backlog_bytes for job in s.jobs)
    waiting = sum(1 for job in s.jobs if not job.worker and job.queued)
    unplaced = f" · [yellow]{waiting} jobs wait for a slot[/]" if waiting else ""
    return [
        f"[bold]pool {s.pool}[/] · {s.info.get('base_model', '-')} · clock {leader} · {s.clock.get('state', 'new')}",
        f"cycle [bold]{s.clock.get('cycle', 0)}[/] · {cycles_a_second:.1f} cycles/s · {count(tokens_a_second)} tokens/s"
        f" · backlog {queued} requests, {count(size)} bytes{unplaced}",
    ]


def _workers(s: Snapshot) -> Any:
    if not s.workers:
        return "[red]no workers: start one with `mainspring worker`[/]"
    table = new_table("worker", "state", "slots", "load", "heartbeat", numbers=("slots", "load"))
    for worker in s.workers:
        silent = f"{ago(worker.silent_ms)} ago"
        table.add_row(
            worker.name,
            worker.state,
            f"{worker.jobs}/{worker.slots}",
            count(worker.load),
            f"[red]{silent}[/]" if worker.silent_ms > SILENT_MS else silent,
        )
    return table


def _jobs(s: Snapshot, rows: int) -> Any:
    if not s.jobs:
        return "no open jobs"
    last = {(part.tenant, part.job): (cycle.number, part.ops) for cycle in s.cycles for part in cycle.parts}
    numbers = ("queued", "updates", "failed")
    table = new_table("tenant", "job", "state", "worker", *numbers, "last cycle", "active", numbers=numbers)

    def place(job: Job) -> tuple[int, str, str]:  # rows that are active keep their places
        idle_ms = s.now_ms - (job.active_ms or 0)
        return (0 if job.queued or idle_ms < ACTIVE_MS else idle_ms), job.tenant, job.name

    for job in sorted(s.jobs, key=place)[:rows]:
        number, ops = last.get((job.tenant, job.name), (None, ()))
        table.add_row(
            job.tenant,
            job.name,
            job.state,
            job.worker or "-",
            str(job.queued),
            str(job.updates),
            f"[red]{job.failed}[/]" if job.failed else "0",
            f"{number} {short(ops)}" if number is not None else "-",
            f"{ago(max(s.now_ms - job.active_ms, 0))} ago" if job.active_ms is not None else "-",
        )
    return table
