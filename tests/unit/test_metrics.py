"""What clock and worker count, with bounded labels; dashboards and alerts that ask only for what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mainspring_broker.functions import Executed
from mainspring_clock.metrics import ClockMetrics, PoolCollector
from mainspring_workers.metrics import WorkerMetrics
from tests.doc_tables import metrics_rows

OPS = Path(__file__).resolve().parents[2] / "ops"
KNOWN = {row[0] for row in metrics_rows()}
SAMPLES = KNOWN | {
    f"{row[0]}_{part}" for row in metrics_rows() if row[2] == "histogram" for part in ("bucket", "sum", "count")
}


def executed(op: str, outcome: str = "ok") -> Executed:
    return Executed("acme", "j1", 1, op, outcome, "", 0, b"")


def value(metrics: ClockMetrics | WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_clock_counts_its_cycles() -> None:
    metrics = ClockMetrics()
    metrics.cycle_closed(requests=4, tokens=100, seconds=0.02)
    metrics.cycle_closed(requests=2, tokens=50, seconds=0.2)
    assert value(metrics, "mainspring_cycles_total") == 2
    assert value(metrics, "mainspring_cycle_requests_total") == 6
    assert value(metrics, "mainspring_cycle_tokens_sum") == 150
    assert value(metrics, "mainspring_cycle_seconds_bucket", le="0.025") == 1


def test_a_worker_counts_requests_by_operation_and_outcome() -> None:
    metrics = WorkerMetrics()
    batch = [executed("forward_backward"), executed("forward_backward", "empty_batch"), executed("optim_step")]
    metrics.batch(batch, 300, 0.001, 0.1, 0.002, committed=True)
    assert value(metrics, "mainspring_requests_total", op="forward_backward", outcome="ok") == 1
    assert value(metrics, "mainspring_requests_total", op="forward_backward", outcome="empty_batch") == 1
    assert value(metrics, "mainspring_worker_tokens_per_second") == pytest.approx(3000)
    assert value(metrics, "mainspring_worker_commit_seconds_count") == 1


def test_a_batch_that_was_taken_back_counts_no_requests() -> None:
    metrics = WorkerMetrics()
    metrics.batch([executed("optim_step")], 0, 0.001, 0.1, 0.002, committed=False)
    assert value(metrics, "mainspring_requests_total", op="optim_step", outcome="ok") is None
    assert value(metrics, "mainspring_worker_batches_dropped_total") == 1


def test_what_clients_make_up_makes_no_new_labels() -> None:
    metrics = WorkerMetrics()
    metrics.batch([executed(f"made-up-{i}", f"code-{i}") for i in range(50)], 0, 0.0, 0.0, 0.0, committed=True)
    assert value(metrics, "mainspring_requests_total", op="other", outcome="other") == 50


def test_all_names_are_ours_and_have_their_unit() -> None:
    for name, _, kind, _, meaning in metrics_rows():
        assert name.startswith("mainspring_")
        assert (kind == "counter") == name.endswith("_total")
        assert meaning
    assert len(KNOWN) == len(metrics_rows()), "a name is used twice"


def test_a_standby_says_nothing_of_the_pool() -> None:
    assert list(PoolCollector(None, "p", lambda: False).collect()) == []  # type: ignore[arg-type]


# -- what operators load into Prometheus and Grafana ------------------------------------------------------------------


def expressions(value: Any) -> list[str]:
    """All values of `expr` in a file."""
    if isinstance(value, dict):
        found = [value["expr"]] if isinstance(value.get("expr"), str) else []
        return found + [expr for inner in value.values() for expr in expressions(inner)]
    return [expr for inner in value for expr in expressions(inner)] if isinstance(value, list) else []


@pytest.mark.parametrize("name", ["alerts.yml", "grafana/dashboard.json"])
def test_they_ask_only_for_metrics_that_exist(name: str) -> None:
    text = (OPS / name).read_text("utf-8")
    found = expressions(json.loads(text) if name.endswith(".json") else yaml.safe_load(text))
    assert len(found) > 5
    asked = {metric for expr in found for metric in re.findall(r"\bmainspring_\w+", expr)}
    assert asked <= SAMPLES, asked - SAMPLES
    for expr in found:
        assert expr.count("(") == expr.count(")"), expr


def test_the_dashboard_shows_every_metric_of_clock_and_worker() -> None:
    text = (OPS / "grafana/dashboard.json").read_text("utf-8")
    assert {name for name in KNOWN if name not in text} == set()


def test_prometheus_scrapes_the_services_of_the_compose_file() -> None:
    compose = yaml.safe_load((OPS.parent / "docker-compose.yml").read_text("utf-8"))
    config = yaml.safe_load((OPS / "prometheus.yml").read_text("utf-8"))
    assert [(OPS / name).exists() for name in config["rule_files"]] == [True]
    scraped = {}
    for job in config["scrape_configs"]:
        [found] = job["dns_sd_configs"]
        scraped[found["names"][0]] = found["port"]
    ports = {
        name: service["environment"]["MAINSPRING_METRICS_PORT"]
        for name, service in compose["services"].items()
        if "environment" in service
    }
    assert scraped == ports
