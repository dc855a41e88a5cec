"""What a worker says of each batch: one line in the log, a line for each request that failed, and its metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mainspring_broker.errors import InternalError
from mainspring_broker.functions import Batch, Executed
from mainspring_broker.logs import fields
from mainspring_workers.engine import Outcome
from mainspring_workers.metrics import WorkerMetrics

log = logging.getLogger("mainspring.worker")

FAILURES_SAID = 10  # log lines about failed requests, per batch


@dataclass(frozen=True, slots=True)
class Spans:
    """Seconds that the parts of a batch took."""

    fetch: float
    compute: float
    commit: float


def report_batch(
    metrics: WorkerMetrics,
    batch: Batch,
    executed: Sequence[Executed],
    outcomes: Sequence[Outcome],
    spans: Spans,
    *,
    committed: bool,
) -> None:
    """Log and count a batch; `executed` and `outcomes` are in one order."""
    tokens = sum(header.tokens for job in batch.jobs for header in job.requests)
    facts = fields(
        cycle=batch.cycle,
        jobs=len(batch.jobs),
        requests=len(executed),
        tokens=tokens,
        fetch_ms=round(spans.fetch * 1000, 2),
        compute_ms=round(spans.compute * 1000, 2),
        commit_ms=round(spans.commit * 1000, 2),
    )
    if committed:
        log.info("batch committed", extra=facts)
    else:
        log.warning("batch taken back", extra=facts)
    _log_failures(batch.cycle, executed, outcomes)
    metrics.batch(executed, tokens, spans.fetch, spans.compute, spans.commit, committed=committed)


def _log_failures(cycle: int, executed: Sequence[Executed], outcomes: Sequence[Outcome]) -> None:
    failed = [(done, outcome.error) for done, outcome in zip(executed, outcomes, strict=True) if outcome.error]
    for done, error in failed[:FAILURES_SAID]:
        facts = fields(job=f"{done.tenant}/{done.job}", seq=done.seq, op=done.op, cycle=cycle, code=error.code)
        level = logging.ERROR if isinstance(error, InternalError) else logging.WARNING
        log.log(level, "request failed: %s", error.message, extra=facts)
    if len(failed) > FAILURES_SAID:
        log.warning("%d more requests failed in cycle %d", len(failed) - FAILURES_SAID, cycle)
