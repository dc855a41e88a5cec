"""What a worker logs of a batch: one line, and a line with job and seq for each request that failed, up to a limit."""

from __future__ import annotations

import logging

import pytest

from mainspring_broker.errors import EmptyBatch, InternalError, MainspringError
from mainspring_broker.functions import Batch, BatchJob, Executed, Header
from mainspring_workers.engine import Outcome
from mainspring_workers.metrics import WorkerMetrics
from mainspring_workers.report import FAILURES_SAID, Spans, report_batch


def report(errors: list[MainspringError | None], caplog: pytest.LogCaptureFixture, *, committed: bool = True) -> None:
    headers = tuple(Header(seq, "forward_backward", 10, False) for seq in range(1, len(errors) + 1))
    batch = Batch("token", 7, 0, (BatchJob("acme", "run", "", "", headers),))
    executed = [
        Executed("acme", "run", header.seq, header.op, error.code if error else "ok", "", 0, b"")
        for header, error in zip(headers, errors, strict=True)
    ]
    outcomes = [Outcome("acme/run", header.seq, None, error) for header, error in zip(headers, errors, strict=True)]
    with caplog.at_level(logging.INFO, "mainspring.worker"):
        report_batch(WorkerMetrics(), batch, executed, outcomes, Spans(0.001, 0.1, 0.002), committed=committed)


def test_a_good_batch_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    report([None, None], caplog)
    [line] = caplog.records
    assert line.getMessage() == "batch committed"
    assert line.__dict__["fields"] == {
        "cycle": 7,
        "jobs": 1,
        "requests": 2,
        "tokens": 20,
        "fetch_ms": 1.0,
        "compute_ms": 100.0,
        "commit_ms": 2.0,
    }


def test_a_failed_request_is_named_by_job_and_seq(caplog: pytest.LogCaptureFixture) -> None:
    report([None, EmptyBatch("there is no datum"), InternalError("ours")], caplog)
    _, refused, broken = caplog.records
    assert (refused.levelname, broken.levelname) == ("WARNING", "ERROR")
    assert refused.getMessage() == "request failed: there is no datum"
    assert refused.__dict__["fields"] == {
        "job": "acme/run",
        "seq": 2,
        "op": "forward_backward",
        "cycle": 7,
        "code": "empty_batch",
    }


def test_a_batch_full_of_failures_is_no_storm(caplog: pytest.LogCaptureFixture) -> None:
    report([EmptyBatch("no datum")] * 500, caplog)
    assert len(caplog.records) == 1 + FAILURES_SAID + 1
    assert caplog.records[-1].getMessage() == f"{500 - FAILURES_SAID} more requests failed in cycle 7"


def test_a_batch_that_was_taken_back_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    report([None], caplog, committed=False)
    assert [(line.levelname, line.getMessage()) for line in caplog.records] == [("WARNING", "batch taken back")]
