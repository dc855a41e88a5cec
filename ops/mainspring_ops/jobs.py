"""`mainspring jobs`: who trains what, and how far each job is."""

from __future__ import annotations

from typing import Annotated

import typer

from mainspring_ops.terminal import DEFAULT_URL, Pool, Url, ago, console, new_table, open_view


def jobs(
    tenant: Annotated[str | None, typer.Argument(help="Only this tenant's jobs.")] = None,
    url: Url = DEFAULT_URL,
    pool: Pool = "main",
    limit: Annotated[int, typer.Option(min=1, help="Show so many jobs at most.")] = 1000,
) -> None:
    """List the jobs that have not ended.

    queued: accepted requests that have not run. done: requests that have, failed ones among them. updates: optimizer
    steps that were applied. active: since the end of its last cycle.
    """
    with open_view(url, pool) as view:
        rows, now = view.jobs(tenant, limit), view.now_ms()
    if not rows:
        console().print(f"no open jobs in pool {pool}" + (f" of tenant {tenant}" if tenant else ""))
        return
    numbers = ("rank", "queued", "done", "updates", "failed")
    table = new_table("tenant", "job", "state", "base model", "rank", "worker", *numbers[1:], "active", numbers=numbers)
    for job in rows:
        table.add_row(
            job.tenant,
            job.name,
            job.state,
            job.base_model,
            str(job.rank),
            job.worker or "-",
            str(job.queued),
            str(job.done),
            str(job.updates),
            f"[red]{job.failed}[/]" if job.failed else "0",
            f"{ago(now - job.active_ms)} ago" if job.active_ms is not None else "-",
        )
    console().print(table)
