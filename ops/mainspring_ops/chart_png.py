"""The picture of cycles as a PNG, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mainspring_ops.chart import Chart
from mainspring_ops.terminal import CommandFailed, ago, count

INK, FAINT, GRID, SHADE = "#1A1A1A", "#6B6B6B", "#C9C9C9", "#F5F5F5"
INCHES_PER_CYCLE, LEAST_INCHES, MOST_INCHES = 0.62, 6.0, 40.0
ROW_INCHES = 0.46
POINTS_PER_LETTER = 6.0  # at font size 9, on the wide side
HALF = 0.34  # of a row: half the height of a box


def write_png(chart: Chart, title: str, path: Path) -> None:
    """Draw the chart into a file.

    Raises:
        CommandFailed: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandFailed(
            "a PNG needs matplotlib: pip install 'mainspring[plots]', or use --html, which needs nothing"
        ) from None
    width = min(max(INCHES_PER_CYCLE * len(chart.bands), LEAST_INCHES), MOST_INCHES)
    rows = len(chart.rows)
    left = 0.3 + 0.078 * max(len(row.name) for row in chart.rows)
    right = 0.3 + 0.072 * max(len(row.summary) for row in chart.rows)
    height = ROW_INCHES * rows
    top, bottom = 0.85, 1.45
    figure = Figure(figsize=(left + width + right, top + height + bottom), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    whole = (left + width + right, top + height + bottom)
    jobs = figure.add_axes((left / whole[0], bottom / whole[1], width / whole[0], height / whole[1]))
    tokens = figure.add_axes((left / whole[0], 0.72 / whole[1], width / whole[0], 0.5 / whole[1]), sharex=jobs)
    painter = _Painter(chart, jobs, tokens, points_per_ms=72 * width / chart.width)
    painter.columns()
    painter.cells()
    painter.names()
    painter.tokens()
    figure.text(0.12 / whole[0], 1 - 0.3 / whole[1], title, fontsize=11, color=INK, weight="bold", va="center")
    _legend(figure, chart, whole)
    figure.savefig(path, format="png")


class _Painter:
    def __init__(self, chart: Chart, jobs: Any, tokens: Any, points_per_ms: float) -> None:
        self.chart = chart
        self.jobs_axes = jobs
        self.tokens_axes = tokens
        self.points_per_ms = points_per_ms

    def fits(self, text: str, ms: float, size: float = 9) -> bool:
        return len(text) * POINTS_PER_LETTER * size / 9 <= ms * self.points_per_ms

    def columns(self) -> None:
        """Shades and numbers of the cycles, and the pauses between them."""
        axes, rows = self.jobs_axes, len(self.chart.rows)
        axes.set_xlim(0, self.chart.width)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_axis_off()
        free = -1.0  # no number before this place
        for index, band in enumerate(self.chart.bands):
            if index % 2 == 0:
                axes.axvspan(band.x, band.x + band.width, color=SHADE, lw=0, zorder=0)
            axes.plot([band.x] * 2, [-0.5, rows - 0.5], color=GRID, lw=0.8, zorder=1)
            number, middle = str(band.cycle.number), band.x + band.width / 2
            half = (len(number) * POINTS_PER_LETTER / 2 + 3) / self.points_per_ms
            if middle - half >= free:
                axes.text(middle, -0.62, number, ha="center", va="bottom", fontsize=9, color=INK, clip_on=False)
                free = middle + half
        axes.text(0, -0.62, "cycle  ", ha="right", va="bottom", fontsize=9, color=FAINT, clip_on=False)
        for pause in self.chart.pauses:
            if pause.cut:
                axes.plot([pause.x] * 2, [-0.5, rows - 0.5], color=GRID, lw=0.8, zorder=1)
                middle, text = pause.x + pause.width / 2, ago(pause.ms)
                axes.text(middle, (rows - 1) / 2, text, rotation=90, ha="center", va="center", fontsize=8, color=FAINT)

    def cells(self) -> None:
        from matplotlib.patches import Rectangle

        for cell in self.chart.cells:
            for box in cell.boxes:
                edge = Rectangle((box.x, cell.row - HALF), box.width, 2 * HALF, fc=box.colour, ec="white", lw=0.7)
                edge.set_zorder(2)
                self.jobs_axes.add_patch(edge)
                if cell.lost:
                    edge.set(alpha=0.35, hatch="////")
                text = next((text for text in box.texts if self.fits(text, box.width)), "")
                self.jobs_axes.text(
                    box.x + box.width / 2, cell.row, text, ha="center", va="center", fontsize=8.5, color=box.ink
                )

    def names(self) -> None:
        for index, row in enumerate(self.chart.rows):
            self.jobs_axes.plot([0, self.chart.width], [index + 0.5] * 2, color=GRID, lw=0.5, zorder=1)
            self.jobs_axes.annotate(
                row.name, (0, index), (-7, 0), textcoords="offset points", ha="right", va="center", fontsize=9.5
            )
            self.jobs_axes.annotate(
                row.summary,
                (self.chart.width, index),
                (8, 0),
                textcoords="offset points",
                ha="left",
                va="center",
                fontsize=9,
                color=FAINT,
            )
        if self.chart.hidden:
            self.jobs_axes.annotate(
                f"and {self.chart.hidden} more jobs",
                (0, len(self.chart.rows) - 0.5),
                (-7, -6),
                textcoords="offset points",
                ha="right",
                va="center",
                fontsize=8,
                color=FAINT,
            )

    def tokens(self) -> None:
        """Bars of tokens, with milliseconds below."""
        axes = self.tokens_axes
        axes.set_axis_off()
        most = max(max(band.cycle.tokens for band in self.chart.bands), 1)
        axes.set_ylim(0, most * 1.5)
        for band in self.chart.bands:
            middle, tokens = band.x + band.width / 2, count(band.cycle.tokens)
            axes.bar(middle, band.cycle.tokens, width=band.width * 0.82, color="#B8C4CC")
            if self.fits(tokens, band.width, 7.5):
                axes.text(
                    middle,
                    band.cycle.tokens + most * 0.06,
                    tokens,
                    ha="center",
                    va="bottom",
                    fontsize=7.5,
                    color=FAINT,
                )
            ms = f"{band.cycle.ms}{'…' if band.cut else ''}"
            if self.fits(ms, band.width, 7.5):
                axes.text(middle, -most * 0.12, ms, ha="center", va="top", fontsize=7.5, color=FAINT, clip_on=False)
        axes.text(0, most * 0.4, "tokens  ", ha="right", va="center", fontsize=8.5, color=FAINT)
        axes.text(0, -most * 0.12, "ms  ", ha="right", va="top", fontsize=8.5, color=FAINT)


def _legend(figure: Any, chart: Chart, whole: tuple[float, float]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=text) for colour, text in chart.legend]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.05 / whole[0], 0.02 / whole[1]),
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        handlelength=1.1,
        handleheight=0.9,
        columnspacing=1.4,
    )
