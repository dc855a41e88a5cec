"""The layout of a picture of cycles: jobs down, cycles across, as wide as they were long. Pure; renderers only draw it.

Lengths are milliseconds, but not everywhere true to scale, or one slow cycle would leave no room for the others: a cycle
is drawn at least 0.4 and at most 2.5 times as wide as the median one, and a pause between cycles at most as wide as that.
What was cut is marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from mainspring_ops.cycles import LETTERS
from mainspring_ops.view import Cycle, Part

MAX_ROWS = 40
NARROWEST, WIDEST, LONGEST_PAUSE = 0.4, 2.5, 1.0  # times the median cycle
WEIGHTS = {"forward_backward": 3, "forward": 2}  # of the others: 1. Nobody measures single operations
MAX_WEIGHT_TIMES = 2

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart; letters say it once more.
COLOURS = {
    "forward_backward": "#0072B2",
    "optim_step": "#E69F00",
    "forward": "#56B4E9",
    "save_state": "#009E73",
    "save_weights": "#009E73",
    "load_state": "#CC79A7",
    "init": "#CC79A7",
    "end": "#4D4D4D",
}
OTHER = "#D55E00"
DARK = {"#0072B2", "#009E73", "#4D4D4D", "#D55E00"}  # colours that want white letters
LEGEND = (
    ("forward_backward", "FB  forward_backward"),
    ("optim_step", "O  optim_step"),
    ("forward", "F  forward"),
    ("save_state", "S  save"),
    ("init", "I, L  init, load"),
    ("end", "E  end"),
)


@dataclass(frozen=True, slots=True)
class Band:
    """One cycle's column."""

    cycle: Cycle
    x: float
    width: float
    cut: bool  # the cycle was longer than it is drawn


@dataclass(frozen=True, slots=True)
class Pause:
    """Between two cycles: nothing ran anywhere."""

    x: float
    width: float
    ms: int
    cut: bool


@dataclass(frozen=True, slots=True)
class Box:
    """One or several operations of one kind, in their order; only the order of boxes within a cell is measured."""

    x: float
    width: float
    op: str
    text: str  # FB×3

    @property
    def colour(self) -> str:
        return COLOURS.get(self.op, OTHER)

    @property
    def texts(self) -> tuple[str, str]:
        """What to write on it, the longer one if there is room."""
        return self.text, LETTERS.get(self.op, "?")

    @property
    def ink(self) -> str:
        return "#FFFFFF" if self.colour in DARK else "#1A1A1A"


@dataclass(frozen=True, slots=True)
class Cell:
    """What one job did in one cycle: as long as its worker's batch took. What is left of the band is waiting for others."""

    row: int
    band: Band
    part: Part
    boxes: tuple[Box, ...]
    busy_ms: float  # of the worker's batch
    lost: bool  # the worker was lost: the requests ran again in a later cycle


@dataclass(frozen=True, slots=True)
class Row:
    """One job. Span and period are medians of its updates that are wholly in the picture, None if there are too few."""

    name: str
    updates: int
    span: float | None
    period: float | None

    @property
    def summary(self) -> str:
        if self.span is None:
            return ""
        period = "" if self.period is None else f" · period {self.period:g}"
        return f"span {self.span:g}{period}"


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything a renderer needs; x runs from 0 to `width`."""

    rows: tuple[Row, ...]
    bands: tuple[Band, ...]
    pauses: tuple[Pause, ...]
    cells: tuple[Cell, ...]
    width: float
    hidden: int  # jobs without a row

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Colour and text of each kind of operation in the picture."""
        colours = {box.colour for cell in self.cells for box in cell.boxes}
        known = [(COLOURS[op], text) for op, text in LEGEND if COLOURS[op] in colours]
        return known + ([(OTHER, "other")] if OTHER in colours else [])


def lay_out(history: Sequence[Cycle]) -> Chart:
    """Rows are jobs by first appearance, columns are cycles; `history` is not empty, and oldest first."""
    bands, pauses, width = _columns(history)
    jobs: dict[tuple[str, str], list[tuple[Band, Part]]] = {}
    for band in bands:
        for part in band.cycle.parts:
            jobs.setdefault((part.tenant, part.job), []).append((band, part))
    shown = list(jobs.items())[:MAX_ROWS]
    one_tenant = len({tenant for tenant, _ in jobs}) == 1
    rows = [_row(job if one_tenant else f"{tenant}/{job}", places) for (tenant, job), places in shown]
    cells = [_cell(row, band, part) for row, (_, places) in enumerate(shown) for band, part in places]
    return Chart(tuple(rows), tuple(bands), tuple(pauses), tuple(cells), width, len(jobs) - len(shown))


def busy_ms(cycle: Cycle, worker: str) -> float | None:
    """How long the worker's batch took; None if the worker was lost."""
    timing = cycle.workers.get(worker, {})
    if timing.get("lost"):
        return None
    took = timing.get("fetch_ms", 0.0) + timing.get("compute_ms", 0.0)
    return min(float(took), cycle.ms) if took else float(cycle.ms)


def _columns(history: Sequence[Cycle]) -> tuple[list[Band], list[Pause], float]:
    usual = max(median(cycle.ms for cycle in history), 1.0)
    bands: list[Band] = []
    pauses: list[Pause] = []
    x = 0.0
    before: Cycle | None = None
    for cycle in history:
        if before is not None and (gap := cycle.started_ms - before.started_ms - before.ms) > 0:
            drawn = min(gap, LONGEST_PAUSE * usual)
            pauses.append(Pause(x, drawn, gap, drawn < gap))
            x += drawn
        width = min(max(float(cycle.ms), NARROWEST * usual), WIDEST * usual)
        bands.append(Band(cycle, x, width, width < cycle.ms))
        x += width
        before = cycle
    return bands, pauses, x


def _cell(row: int, band: Band, part: Part) -> Cell:
    busy = busy_ms(band.cycle, part.worker)
    share = 1.0 if busy is None or not band.cycle.ms else max(busy / band.cycle.ms, 0.1)
    runs = [(op, len(list(group))) for op, group in groupby(part.ops)]
    weights = [WEIGHTS.get(op, 1) * min(times, MAX_WEIGHT_TIMES) for op, times in runs]
    unit = band.width * share / max(sum(weights), 1)
    boxes, x = [], band.x
    for (op, times), weight in zip(runs, weights, strict=True):
        text = LETTERS.get(op, op) + (f"×{times}" if times > 1 else "")
        boxes.append(Box(x, unit * weight, op, text))
        x += unit * weight
    return Cell(row, band, part, tuple(boxes), busy or 0.0, busy is None)


def _row(name: str, places: Iterable[tuple[Band, Part]]) -> Row:
    begin: int | None = None
    spans: list[int] = []
    starts: list[int] = []
    for band, part in places:
        if busy_ms(band.cycle, part.worker) is None:
            continue
        for op in part.ops:
            if op == "forward_backward" and begin is None:
                begin = band.cycle.number
            elif op == "optim_step" and begin is not None:
                spans.append(band.cycle.number - begin + 1)
                starts.append(begin)
                begin = None
    periods = [b - a for a, b in pairwise(starts)]
    return Row(name, len(spans), median(spans) if spans else None, median(periods) if periods else None)
