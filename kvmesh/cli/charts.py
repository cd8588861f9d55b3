"""Line charts as SVG, and the HTML page around them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 220, 56, 30, 24
STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1340px;padding:0 1rem;color:#1f2328}"
    "table{border-collapse:collapse}td,th{padding:.2rem .8rem .2rem 0;text-align:left;border-bottom:1px solid #d0d7de}"
    "svg{width:640px;max-width:100%}.grid{stroke:#d8dee4}polyline{stroke-width:1.4}text{font-size:11px;fill:#57606a}"
    ".title{font-size:13px;fill:#1f2328}.y,.legend{text-anchor:end}.x{text-anchor:middle}"
    "@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}.title{fill:#e6edf3}.grid{stroke:#30363d}}"
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#9a6700")
POINTS_MAX = 600
"""More points than pixels would only make the file larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """Points in order of x. `is_step`: the value holds until the next point."""

    name: str
    points: Sequence[tuple[float, float]]
    is_step: bool = False


def html_page(title: str, body: Sequence[str]) -> str:
    """Returns a page that needs nothing else: no script, no font and no style from elsewhere. `body`: HTML after the heading."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(body)}</body></html>\n"
    )


def chart(*, title: str, x_name: str, y_name: str, lines: Sequence[ChartLine]) -> str:
    """Returns all lines in one chart, both axes from the smallest x and 0."""
    shown = [line for line in lines if line.points]
    if not shown:
        return ""
    x_low = min(line.points[0][0] for line in shown)
    x_high = max(line.points[-1][0] for line in shown)
    y_high = max(max(y for _, y in line.points) for line in shown) or 1.0
    x_span = (x_high - x_low) or 1.0

    def place(x: float, y: float) -> str:
        left = LEFT + (x - x_low) / x_span * (WIDTH - LEFT - 10)
        return f"{left:.1f},{HEIGHT - BOTTOM - y / y_high * (HEIGHT - BOTTOM - TOP):.1f}"

    parts = [f'<text x="{LEFT}" y="14" class="title">{escape(title)}</text>']
    for i in range(5):
        value = y_high * i / 4
        y = HEIGHT - BOTTOM - i / 4 * (HEIGHT - BOTTOM - TOP)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="y">{value:.3g}</text>')
    for i in range(5):
        x = x_low + x_span * i / 4
        left = LEFT + i / 4 * (WIDTH - LEFT - 10)
        parts.append(f'<text x="{left:.1f}" y="{HEIGHT - 14}" class="x">{x:.4g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 2}" class="x">{escape(x_name)}; {escape(y_name)}</text>')
    for number, line in enumerate(shown):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(x, y) for x, y in _drawn(line))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}"><title>{escape(line.name)}</title></polyline>'
        )
        legend = f'<text x="{WIDTH - 14}" y="{TOP + 12 + 14 * number}" class="legend" fill="{colour}">{escape(line.name)}</text>'
        parts.append(legend)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _drawn(line: ChartLine) -> list[tuple[float, float]]:
    points = list(line.points)
    if len(points) > POINTS_MAX:
        stride = len(points) / POINTS_MAX
        points = [points[int(i * stride)] for i in range(POINTS_MAX - 1)] + [points[-1]]
    if not line.is_step:
        return points
    drawn = points[:1]
    for x, y in points[1:]:
        drawn += [(x, drawn[-1][1]), (x, y)]
    return drawn


def distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """(percentile, value) of sorted values, up to the 99.9th."""
    if not values:
        return []
    shares = [i / 200 for i in range(199)] + [0.995, 0.999]
    return [(100 * share, values[min(len(values) - 1, int(len(values) * share))]) for share in shares]
