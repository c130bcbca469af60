"""A loss curve as an SVG image, written by hand: a plotting library would outweigh the rest of the package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Final

__all__ = ["loss_curve"]

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 48, 52
#: A curve with fewer points than this needs no smoothing.
_WORTH_SMOOTHING: Final = 20
#: A larger loss counts as infinite: an axis up to it would flatten all others.
_LIMIT: Final = 1e30

# Light colours are attributes, which every viewer supports. Dark colours need a stylesheet.
_STYLE: Final = """\
text { font-family: system-ui, sans-serif; font-size: 13px; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #16181d; } text { fill: #e6e6e6; } .grid { stroke: #33373f; }
  .axis { stroke: #9aa0aa; } .line, .smooth { stroke: #6cb6ff; } .dot { fill: #6cb6ff; }
}"""


@dataclass(frozen=True)
class _Axis:
    """Maps values from `low` to `high` to positions in the image."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def loss_curve(losses: Sequence[float], *, title: str) -> str:
    """Draw the loss of each step, counted from 1, and for long runs a smoothed curve too.

    A loss that is not finite leaves a gap in the line, and a note counts these losses.
    """
    losses = [float(loss) if abs(loss) < _LIMIT else math.nan for loss in losses]
    known = [loss for loss in losses if not math.isnan(loss)]
    low, high = _value_range(known)
    x = _Axis(1, max(len(losses), 2), _LEFT, _WIDTH - _RIGHT)
    y_ticks = _ticks(low, high)
    y = _Axis(y_ticks[0], y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    x_ticks = [tick for tick in _ticks(1, x.high) if tick == int(tick) and 1 <= tick <= x.high]
    if 1 not in x_ticks:
        x_ticks.insert(0, 1)
    smoothing = len(losses) >= _WORTH_SMOOTHING
    drawing = [
        *(_horizontal(y(tick), _label(tick)) for tick in y_ticks),
        *(_below(x(tick), _label(tick)) for tick in x_ticks),
        _frame(),
        *_line(losses, x, y, "line", 'stroke-width="1.5"' + (' opacity="0.45"' * smoothing)),
    ]
    if smoothing:
        drawing += _line(_smoothed(losses), x, y, "smooth", 'stroke-width="2.5"')
    if missing := len(losses) - len(known):
        note = f"{missing} of {len(losses)} not finite"
        drawing.append(_text(_WIDTH - _RIGHT, _TOP + 16, note, "end"))
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{_escaped(title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="ground" width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
            _text(_LEFT, 28, title, "start", 'font-weight="600"'),
            *drawing,
            _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, "step", "middle"),
            _text(18, (_TOP + _HEIGHT - _BOTTOM) / 2, "loss", "middle", _UPWARDS),
            "</svg>",
            "",
        ]
    )


# -- decisions --------------------------------------------------------------------------------------


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if 0 <= low < high / 2:
        low = 0.0  # the curve comes near it anyway, and a reader expects it
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):  # a flat line needs room around it
        margin = max(abs(high) / 2, 0.5)
        return low - margin, high + margin
    return low, high


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers, four to ten of them, from at most `low` to at least `high`."""
    least = (high - low) / 8
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _smoothed(losses: Sequence[float]) -> list[float]:
    """A centred moving average; near the ends the window shrinks on both sides, so that nothing is shifted."""
    reach = max(1, len(losses) // 24)
    smooth = []
    for index, loss in enumerate(losses):
        near = min(reach, index, len(losses) - 1 - index)
        window = losses[index - near : index + near + 1]
        known = [value for value in window if not math.isnan(value)]
        smooth.append(math.nan if math.isnan(loss) else sum(known) / len(known))
    return smooth


# -- drawing ----------------------------------------------------------------------------------------

_UPWARDS: Final = f'transform="rotate(-90 18 {(_TOP + _HEIGHT - _BOTTOM) / 2:g})"'


def _line(values: Sequence[float], x: _Axis, y: _Axis, kind: str, look: str) -> list[str]:
    """One path with a gap at each missing value; a single value between gaps is a dot."""
    points = [(x(step), y(value)) for step, value in enumerate(values, 1)]
    runs = [
        list(run)
        for known, run in groupby(points, key=lambda point: not math.isnan(point[1]))
        if known
    ]
    if not runs:
        return []
    path = " ".join("M" + " L".join(f"{h:.1f},{v:.1f}" for h, v in run) for run in runs)
    dots = [
        f'<circle class="dot" cx="{h:.1f}" cy="{v:.1f}" r="3" fill="#0969da"/>'
        for run in runs
        if len(run) == 1
        for h, v in run
    ]
    stroke = 'fill="none" stroke="#0969da" stroke-linejoin="round"'
    return [f'<path class="{kind}" d="{path}" {stroke} {look}/>', *dots]


def _horizontal(height: float, label: str) -> str:
    line = f'<path class="grid" d="M{_LEFT},{height:.1f} H{_WIDTH - _RIGHT}" stroke="#e2e4e8"/>'
    return line + _text(_LEFT - 8, height + 4, label, "end")


def _below(position: float, label: str) -> str:
    bottom = _HEIGHT - _BOTTOM
    line = f'<path class="axis" d="M{position:.1f},{bottom} v5" stroke="#5b616b"/>'
    return line + _text(position, bottom + 20, label, "middle")


def _frame() -> str:
    path = f"M{_LEFT},{_TOP} V{_HEIGHT - _BOTTOM} H{_WIDTH - _RIGHT}"
    return f'<path class="axis" d="{path}" fill="none" stroke="#5b616b"/>'


def _text(x: float, y: float, text: str, anchor: str, look: str = "") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#1f2328"'
    return f"<text {where} {look}>{_escaped(text)}</text>"


def _label(value: float) -> str:
    return f"{value:.6g}"


def _escaped(text: str) -> str:
    """Text escaped for XML; control characters, which XML forbids, become spaces."""
    return escape("".join(c if c.isprintable() else " " for c in text))
