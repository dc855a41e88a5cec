"""The tables of settings, keys and errors in docs/, made from the code. `make docs` writes them into their pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from mainspring.settings import ClientSettings
from mainspring_broker import errors, keys
from mainspring_clock.metrics import ClockMetrics, PoolCollector
from mainspring_clock.settings import ClockSettings
from mainspring_workers.metrics import WorkerMetrics
from mainspring_workers.settings import WorkerSettings

DOCS = Path(__file__).resolve().parents[1] / "docs"
SETTINGS = {"clock": ClockSettings, "worker": WorkerSettings, "client": ClientSettings}


def settings_rows() -> list[list[str]]:
    """Variable, processes, default, meaning of every setting of every process."""
    found: dict[str, list[str]] = {}
    for process, cls in SETTINGS.items():
        for name, spec in cls.model_fields.items():
            variable = f"MAINSPRING_{name.upper()}"
            default = "" if spec.default in ("", None) else str(spec.default)
            row = found.setdefault(variable, [variable, process, default, spec.description or "?"])
            assert row[2] == default, f"{variable} has two defaults"
            if process not in row[1]:
                row[1] += f", {process}"
    return list(found.values())


def keys_rows() -> list[list[str]]:
    """The table of keys.py."""
    lines = [line.strip() for line in (keys.__doc__ or "").splitlines() if line.startswith("    ms:")]
    table = []
    for line in lines:
        key, *rest = re.split(r"\s{2,}", line)
        kind, holds = rest[0].split(maxsplit=1) if " " in rest[0] else (rest[0], rest[1])
        tail = rest[1:] if " " in rest[0] else rest[2:]
        table.append([key, kind, holds, *tail, *[""] * (2 - len(tail))])
    return table


def metrics_rows() -> list[list[str]]:
    """Name as it is scraped, process, type, labels and meaning of every metric."""
    rows = []
    for process, metrics in {"clock": ClockMetrics(), "worker": WorkerMetrics()}.items():
        found = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
        for each in found:
            name = each._name + ("_total" if each._type == "counter" else "")
            rows.append([name, process, each._type, ", ".join(each._labelnames), each._documentation])
    for family in PoolCollector.describe():
        rows.append([family.name, "clock", family.type, ", ".join(family._labelnames), family.documentation])
    return rows


def error_rows() -> list[list[str]]:
    """Class, code and meaning from the tree of errors.py."""
    lines = [re.split(r"\s{2,}", line.strip(" │├└─")) for line in (errors.__doc__ or "").splitlines() if "── " in line]
    return [[line[0], line[1] if len(line) > 2 else "", line[-1]] for line in lines]


def markdown(header: str, table: list[list[str]], code: tuple[int, ...]) -> str:
    body = ["| " + " | ".join(f"`{c}`" if i in code and c else c for i, c in enumerate(row)) + " |" for row in table]
    columns = header.count("|") - 1
    return "\n".join([header, "|" + "---|" * columns, *body])


TABLES: dict[str, tuple[str, Callable[[], list[list[str]]], tuple[int, ...]]] = {
    "settings.md": ("| variable | read by | default | meaning |", settings_rows, (0, 2)),
    "keys.md": ("| key | type | holds | written by | expires |", keys_rows, (0,)),
    "metrics.md": ("| metric | of | type | labels | meaning |", metrics_rows, (0,)),
    "errors.md": ("| class | code | when |", error_rows, (0, 1)),
}


def table(name: str) -> str:
    """The table that page `name` must hold."""
    header, make, code = TABLES[name]
    return markdown(header, make(), code)


def replace_table(page: str, new: str) -> str:
    """The page with `new` between its two marks."""
    return re.sub(r"(<!-- table -->\n).*?(\n<!-- end -->)", lambda marks: marks[1] + new + marks[2], page, flags=re.S)


if __name__ == "__main__":
    for name in TABLES:
        path = DOCS / name
        path.write_text(replace_table(path.read_text("utf-8"), table(name)), "utf-8")
