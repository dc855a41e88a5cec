"""`mainspring workers`: who computes, and who has gone silent."""

from __future__ import annotations

from mainspring_ops.terminal import DEFAULT_URL, Pool, Url, ago, console, count, new_table, open_view

KNOWN = {"incarnation", "state", "slots", "jobs", "load", "registered_ms"}  # shown in columns of their own, or dull


def workers(url: Url = DEFAULT_URL, pool: Pool = "main") -> None:
    """List the workers, the clock that leads, and the base model they serve.

    load: a decaying sum of tokens, by which new jobs are placed. heartbeat: since the last sign of life; a worker that
    stays silent is taken out, and its jobs are placed anew.
    """
    with open_view(url, pool) as view:
        rows, info, clock, leads, now = view.workers(), view.info(), view.clock(), view.has_leader(), view.now_ms()
    out = console()
    leader = clock.get("leader", "?") if leads else "none: start one with `mainspring clock`"
    out.print(
        f"pool {pool} · base model {info.get('base_model', '-')} · cycle {clock.get('cycle', 0)} · clock {leader}"
    )
    if not rows:
        out.print("no workers: start one with `mainspring worker`")
        return
    table = new_table("worker", "state", "jobs", "load", "heartbeat", "up", "about", numbers=("jobs", "load"))
    for worker in rows:
        about = " · ".join(f"{name} {value}" for name, value in sorted(worker.fields.items()) if name not in KNOWN)
        table.add_row(
            worker.name,
            worker.state,
            f"{worker.jobs}/{worker.slots}",
            count(worker.load),
            f"{ago(worker.silent_ms)} ago",
            ago(now - worker.registered_ms),
            about,
        )
    out.print(table)
