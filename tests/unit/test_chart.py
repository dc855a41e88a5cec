"""Pictures of cycles: the layout by its numbers, the renderers by what is in their files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mainspring_ops.chart import DARK, MAX_ROWS, OTHER, lay_out
from mainspring_ops.chart_html import html
from mainspring_ops.chart_png import write_png
from mainspring_ops.terminal import CommandFailed
from mainspring_ops.trace import chrome_trace
from mainspring_ops.view import Cycle, Part

UPDATE = ("forward_backward", "optim_step")


def cycle(number: int, started_ms: int, ms: int, *jobs: tuple[str, tuple[str, ...]], workers: Any = None) -> Cycle:
    parts = tuple(Part("acme", job, "w1", ops, 10) for job, ops in jobs)
    return Cycle(number, started_ms, ms, sum(len(ops) for _, ops in jobs), 10 * len(jobs), parts, workers or {})


def busy_pool(count: int = 8) -> list[Cycle]:
    """A job that takes turns with its client, one in pairs, one in every cycle."""
    history = []
    for n in range(count):
        jobs: list[tuple[str, tuple[str, ...]]] = [("ahead", UPDATE)]
        if n % 2 == 0:
            jobs.append(("pair", UPDATE))
            jobs.append(("naive", UPDATE[n % 4 // 2 :][:1]))
        history.append(cycle(n + 1, 1000 + 20 * n, 20, *jobs))
    return history


# -- layout -----------------------------------------------------------------------------------------------------------


def test_rows_tell_span_and_period() -> None:
    rows = {row.name: row for row in lay_out(busy_pool()).rows}
    assert [(row.span, row.period) for row in rows.values()] == [(1, 1), (1, 2), (3, 4)]
    assert rows["naive"].summary == "span 3 · period 4"
    assert rows["pair"].updates == 4


def test_columns_are_as_wide_as_cycles_are_long_within_limits() -> None:
    history = [cycle(1, 0, 20), cycle(2, 20, 30), cycle(3, 50, 1), cycle(4, 51, 900), cycle(5, 951, 20)]
    chart = lay_out(history)
    assert [band.width for band in chart.bands] == [20, 30, 8, 50, 20]
    assert [band.cut for band in chart.bands] == [False, False, False, True, False]
    assert chart.pauses == ()
    assert chart.width == 128


def test_pauses_are_seen_and_long_ones_cut() -> None:
    chart = lay_out([cycle(1, 0, 20), cycle(2, 25, 20), cycle(3, 5045, 20)])
    assert [(pause.x, pause.width, pause.ms, pause.cut) for pause in chart.pauses] == [
        (20, 5, 5, False),
        (45, 20, 5000, True),
    ]
    assert chart.bands[-1].x == 65


def test_boxes_fill_what_the_worker_took_in_the_order_of_operations() -> None:
    ops = ("forward_backward",) * 3 + ("optim_step",)
    [cell] = lay_out([cycle(1, 0, 20, ("a", ops), workers={"w1": {"fetch_ms": 2, "compute_ms": 8}})]).cells
    assert [box.text for box in cell.boxes] == ["FB×3", "O"]
    assert cell.boxes[0].texts == ("FB×3", "FB")
    assert cell.boxes[0].x == 0
    assert cell.boxes[1].x == pytest.approx(cell.boxes[0].width)
    assert sum(box.width for box in cell.boxes) == pytest.approx(10)
    assert cell.busy_ms == 10


def test_what_a_lost_worker_had_in_hand_is_marked_and_not_counted() -> None:
    history = [cycle(1, 0, 20, ("a", UPDATE), workers={"w1": {"lost": True}}), cycle(2, 20, 20, ("a", UPDATE))]
    chart = lay_out(history)
    assert [cell.lost for cell in chart.cells] == [True, False]
    assert chart.rows[0].updates == 1


def test_rows_are_bounded_and_named_with_the_tenant_where_it_matters() -> None:
    many = lay_out([cycle(1, 0, 20, *((f"j{n}", UPDATE) for n in range(MAX_ROWS + 5)))])
    assert (len(many.rows), many.hidden) == (MAX_ROWS, 5)
    other = Part("other", "b", "w1", UPDATE, 1)
    two = Cycle(1, 0, 20, 4, 20, (Part("acme", "a", "w1", UPDATE, 1), other), {})
    assert [row.name for row in lay_out([two]).rows] == ["acme/a", "other/b"]


def test_every_colour_has_readable_letters_and_a_place_in_the_legend() -> None:
    ops = ("init", "forward", "forward_backward", "optim_step", "save_state", "save_weights", "from_the_future", "end")
    chart = lay_out([cycle(1, 0, 20, *((op, (op,)) for op in ops))])
    assert {colour for colour, _ in chart.legend} == {box.colour for cell in chart.cells for box in cell.boxes}
    assert (OTHER, "other") in chart.legend

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for cell in chart.cells:
        for box in cell.boxes:
            light, dark = sorted((luminance(box.ink), luminance(box.colour)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3, box
    assert len(DARK) == 4


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8, 100])
def test_a_png_is_drawn(tmp_path: Path, count: int) -> None:
    pytest.importorskip("matplotlib")
    write_png(lay_out(busy_pool(count)), "pool main", tmp_path / "p.png")
    data = (tmp_path / "p.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert 500 < int.from_bytes(data[16:20], "big") < 10_000


def test_a_png_without_matplotlib_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CommandFailed, match=r"mainspring\[plots\].*--html"):
        write_png(lay_out(busy_pool()), "pool main", tmp_path / "p.png")


def test_the_page_needs_no_network_and_holds_every_detail() -> None:
    page = html(lay_out(busy_pool()), "pool <main>")
    assert "pool &lt;main&gt;" in page
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert "{{" not in page
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.S)[0])  # type: ignore[index]
    details = [element.get("data-details", "") for element in svg.iter("g") if "cell" in element.get("class", "")]
    assert len(details) == 16
    assert details[0] == "acme/ahead\ncycle 1 on w1\nFB · O\n10 tokens, 20.0 of 20 ms"
    numbers = [element.text for element in svg.iter("text") if element.get("class") == "number"]
    assert numbers == [str(n) for n in range(1, 9)]


def test_a_trace_has_workers_as_processes_jobs_as_threads_and_boundaries() -> None:
    trace = json.loads(chrome_trace("main", busy_pool(4)))
    events = trace["traceEvents"]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"
    }
    assert names["process_name", 1, 0] == "clock of pool main"
    assert names["process_name", 2, 0] == "worker w1"
    assert {name for (kind, _, _), name in names.items() if kind == "thread_name"} == {
        "acme/ahead",
        "acme/pair",
        "acme/naive",
    }
    assert [event["ts"] for event in events if event["ph"] == "i"] == [0, 20_000, 40_000, 60_000]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 4 + 8
    assert spans[0] == {
        "ph": "X",
        "name": "cycle 1",
        "cat": "cycle",
        "pid": 1,
        "tid": 0,
        "ts": 0,
        "dur": 20_000,
        "args": {"cycle": 1, "requests": 5, "tokens": 30, "jobs": 3},
    }
    assert all({"ph", "pid", "name"} <= event.keys() for event in events)
