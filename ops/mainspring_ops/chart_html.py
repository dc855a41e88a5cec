"""The picture of cycles as one HTML file: drawn as SVG, details where the pointer is, nothing loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib import resources

from mainspring_ops.chart import Band, Cell, Chart, Pause
from mainspring_ops.cycles import short
from mainspring_ops.terminal import ago, count

PIXELS_PER_CYCLE, LEAST_PIXELS = 64, 520
ROW, BOX, TOP, BARS, LETTER = (
    40,
    26,
    30,
    44,
    7.2,
)  # pixels: heights of a row, a box, the numbers, the bars; width of a letter


def html(chart: Chart, title: str) -> str:
    """The whole page."""
    template = (resources.files("mainspring_ops") / "chart.html").read_text("utf-8")
    names = "".join(
        f'<div class="name" data-row="{index}">{escape(row.name)}<small>{escape(row.summary)}</small></div>'
        for index, row in enumerate(chart.rows)
    )
    legend = "".join(f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in chart.legend)
    hidden = f"<p>and {chart.hidden} more jobs</p>" if chart.hidden else ""
    parts = {"title": escape(title), "names": names, "picture": _svg(chart), "legend": legend, "hidden": hidden}
    for name, text in parts.items():
        template = template.replace(f"{{{{{name}}}}}", text)
    return template


def _svg(chart: Chart) -> str:
    width = max(PIXELS_PER_CYCLE * len(chart.bands), LEAST_PIXELS)
    height = TOP + ROW * len(chart.rows) + BARS + 24
    drawing = _Drawing(chart, width / chart.width)
    body = "\n".join(drawing.shapes())
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">\n{body}\n</svg>'


class _Drawing:
    def __init__(self, chart: Chart, scale: float) -> None:
        self.chart = chart
        self.scale = scale  # pixels per millisecond
        self.floor = TOP + ROW * len(chart.rows)
        self.most_tokens = max(1, *(band.cycle.tokens for band in chart.bands))

    def shapes(self) -> Iterator[str]:
        free = 0.0  # no number before this place
        for index, band in enumerate(self.chart.bands):
            x, width = band.x * self.scale, band.width * self.scale
            yield f'<g class="band{" shade" if index % 2 == 0 else ""}" {_details(_of_band(band))}>'
            yield f'<rect x="{x:.1f}" y="{TOP - 6}" width="{width:.1f}" height="{self.floor - TOP + BARS + 30}"/>'
            number = str(band.cycle.number)
            half = len(number) * LETTER / 2 + 3
            if x + width / 2 - half >= free:
                yield f'<text class="number" x="{x + width / 2:.1f}" y="{TOP - 14}">{number}</text>'
                free = x + width / 2 + half
            yield from self._tokens(band, x, width)
            yield "</g>"
        for row in range(len(self.chart.rows) + 1):
            y = TOP + ROW * row
            yield f'<line class="rule" x1="0" x2="{self.chart.width * self.scale:.1f}" y1="{y}" y2="{y}"/>'
        yield from (self._pause(pause) for pause in self.chart.pauses if pause.cut)
        for cell in self.chart.cells:
            yield from self._cell(cell)

    def _tokens(self, band: Band, x: float, width: float) -> Iterator[str]:
        high = (BARS - 18) * band.cycle.tokens / self.most_tokens
        base = self.floor + BARS
        yield f'<rect class="bar" x="{x + width * 0.1:.1f}" y="{base - high:.1f}" width="{width * 0.8:.1f}" height="{high:.1f}"/>'
        for text, y in ((count(band.cycle.tokens), base - high - 4), (f"{band.cycle.ms}{'…' * band.cut}", base + 15)):
            if len(text) * LETTER * 0.85 <= width:
                yield f'<text class="small" x="{x + width / 2:.1f}" y="{y:.1f}">{text}</text>'

    def _pause(self, pause: Pause) -> str:
        x, y = (pause.x + pause.width / 2) * self.scale, (TOP + self.floor) / 2
        return f'<text class="small" transform="translate({x + 4:.1f} {y:.1f}) rotate(-90)">{ago(pause.ms)}</text>'

    def _cell(self, cell: Cell) -> Iterator[str]:
        y = TOP + ROW * cell.row + (ROW - BOX) / 2
        yield f'<g class="cell{" lost" if cell.lost else ""}" data-row="{cell.row}" {_details(_of_cell(cell))}>'
        for box in cell.boxes:
            x, width = box.x * self.scale, box.width * self.scale
            yield f'<rect x="{x:.1f}" y="{y}" width="{max(width - 1, 1):.1f}" height="{BOX}" fill="{box.colour}"/>'
            text = next((text for text in box.texts if len(text) * LETTER <= width), "")
            if text:
                middle = x + (width - 1) / 2
                yield f'<text x="{middle:.1f}" y="{y + BOX / 2 + 4:.1f}" fill="{box.ink}">{escape(text)}</text>'
        yield "</g>"


def _of_cell(cell: Cell) -> list[str]:
    part, cycle = cell.part, cell.band.cycle
    ran = "its worker was lost: it ran again later" if cell.lost else f"{cell.busy_ms:.1f} of {cycle.ms} ms"
    return [
        f"{part.tenant}/{part.job}",
        f"cycle {cycle.number} on {part.worker}",
        short(part.ops).replace("·", " · "),
        f"{part.tokens} tokens, {ran}",
    ]


def _of_band(band: Band) -> list[str]:
    cycle = band.cycle
    return [
        f"cycle {cycle.number}",
        f"{cycle.ms} ms",
        f"{len(cycle.parts)} jobs, {cycle.requests} requests",
        f"{cycle.tokens} tokens",
    ]


def _details(lines: list[str]) -> str:
    text = escape("\n".join(lines), quote=True).replace("\n", "&#10;")
    return f'data-details="{text}"'
