"""Cycles as a Chrome trace: ui.perfetto.dev and chrome://tracing open it. Workers are processes, jobs are their threads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mainspring_ops.chart import busy_ms
from mainspring_ops.cycles import short
from mainspring_ops.view import Cycle

CLOCK = 1  # process id of the clock; workers follow


def chrome_trace(pool: str, history: Sequence[Cycle]) -> str:
    """The trace as JSON text. Times are microseconds since the first cycle in it."""
    start_ms = history[0].started_ms if history else 0
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = [_name("process_name", CLOCK, 0, f"clock of pool {pool}")]
    for cycle in history:
        begin = (cycle.started_ms - start_ms) * 1000
        facts = {"cycle": cycle.number, "requests": cycle.requests, "tokens": cycle.tokens, "jobs": len(cycle.parts)}
        cycle_name = f"cycle {cycle.number}"
        events.append({"ph": "X", "name": cycle_name, "cat": "cycle", "pid": CLOCK, "tid": 0, "args": facts})
        events[-1] |= {"ts": begin, "dur": cycle.ms * 1000}
        events.append({"ph": "i", "name": f"boundary {cycle.number}", "s": "g", "pid": CLOCK, "tid": 0, "ts": begin})
        events.append({"ph": "C", "name": "tokens", "pid": CLOCK, "ts": begin, "args": {"tokens": cycle.tokens}})
        events.append({"ph": "C", "name": "tokens", "pid": CLOCK, "ts": begin + cycle.ms * 1000, "args": {"tokens": 0}})
        for part in cycle.parts:
            if part.worker not in processes:
                processes[part.worker] = CLOCK + 1 + len(processes)
                events.append(_name("process_name", processes[part.worker], 0, f"worker {part.worker}"))
            pid, job = processes[part.worker], f"{part.tenant}/{part.job}"
            if (part.worker, job) not in threads:
                threads[part.worker, job] = len(threads) + 1
                events.append(_name("thread_name", pid, threads[part.worker, job], job))
            busy = busy_ms(cycle, part.worker)
            events.append(
                {
                    "ph": "X",
                    "name": short(part.ops) if busy is not None else f"{short(part.ops)} lost",
                    "cat": "job",
                    "pid": pid,
                    "tid": threads[part.worker, job],
                    "ts": begin,
                    "dur": round((cycle.ms if busy is None else busy) * 1000),
                    "args": {"cycle": cycle.number, "tokens": part.tokens, "operations": " ".join(part.ops)},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
