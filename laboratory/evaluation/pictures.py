"""Pictures of records, as SVG of a few kilobytes: light and dark as the reader's screen is, sharp at every density.

What is drawn is named where it stands, not in a legend. Colours are those that colour-blind people tell apart (Okabe
and Ito's). Every module that has something to draw offers `draw(payload, folder)` and calls this one: nothing else
makes pictures. The same record gives the same bytes.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

# On white, and on black.
_COLORS = (
    ("#0072b2", "#56a8e0"),
    ("#d55e00", "#f0883e"),
    ("#009e73", "#2fc79a"),
    ("#cc79a7", "#dd92bb"),
    ("#b07c00", "#e6b83c"),
    ("#3a9fd0", "#8fd3ff"),
    ("#57606a", "#b1bac4"),
)
_DASHES = ("", "6 3", "2 3")  # of the first seven, of the next, of all others
_SIZE = 13
_LETTER = 0.56 * _SIZE  # the width of a letter at most, on average
_LINE = 16
_PLOT = (460, 270)
_BAR, _BARS = 20, 320
_MOST_TICKS = 7

# Ink, dimmer ink, paper and grid.
_SHADES = (("#24292f", "#57606a", "#fff", "#e4e8ec"), ("#e6edf3", "#9198a1", "#0d1117", "#2a3038"))


@dataclass(frozen=True, slots=True)
class Course:
    """One line of a panel. spread: low and high at each x. color: a number; of courses without one, their place.

    has_line, has_dots: what is drawn of it. has_label: whether its name stands at its end.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    spread: Sequence[tuple[float, float]] = ()
    color: int | None = None
    has_line: bool = True
    has_dots: bool = True
    has_label: bool = True
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """One named point. Those that are best stand out."""

    name: str
    x: float
    y: float
    is_best: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """Axes and what they hold. places: names of x = 0, 1, …; reference: y of a level line, and its name.

    is_diagonal: a line through equal x and y.
    """

    x_label: str
    y_label: str
    courses: Sequence[Course] = ()
    marks: Sequence[Mark] = ()
    is_log_x: bool = False
    is_log_y: bool = False
    y_range: tuple[float, float] | None = None
    x_ticks: Sequence[float] = ()
    places: Sequence[str] = ()
    reference: tuple[float, str] | None = None
    is_diagonal: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    value: float
    low: float | None = None
    high: float | None = None


def lines(
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    courses: Sequence[Course],
    is_log_x: bool = False,
    is_log_y: bool = False,
    y_range: tuple[float, float] | None = None,
    x_ticks: Sequence[float] = (),
) -> None:
    """Courses in one panel, y from zero or by factors (is_log_y); bars where all stand at one x.

    x_ticks: by default round numbers, or with is_log_x every x there is.
    """
    courses = [course for course in courses if course.xs]
    places = sorted({x for course in courses for x in course.xs})
    if len(places) == 1:
        here = [Bar(course.name, course.ys[0], *(course.spread[0] if course.spread else ())) for course in courses]
        bars(path, title=f"{title}; {x_label}: {_number(places[0])}", label=y_label, groups={"": here})
        return
    is_long = any(len(course.xs) > 2 * _MOST_TICKS for course in courses)
    top = max((y for course in courses for y in course.ys), default=1.0) or 1.0
    panel = Panel(
        x_label,
        y_label,
        [replace(course, has_dots=False) for course in courses] if is_long else courses,
        is_log_x=is_log_x,
        is_log_y=is_log_y,
        y_range=None if is_log_y else y_range or (0.0, top),
        x_ticks=x_ticks or (places if is_log_x else ()),
    )
    panels(path, title=title, shown=[panel])


def panels(path: Path, *, title: str, shown: Sequence[Panel]) -> None:
    """Panels beside one another, under one title."""
    body: list[str] = []
    left = 0.0
    for panel in shown:
        drawing = _Axes(panel, left, top=62.0)
        body += drawing.drawn()
        left = drawing.end
    height = 62 + _PLOT[1] + 52
    _write(path, title, left, height, body)


def bars(
    path: Path, *, title: str, label: str, groups: Mapping[str, Sequence[Bar]], reference: float | None = None
) -> None:
    """A bar for each value, with its number and its spread; groups one below another, by their names.

    reference: a value that all are compared with; a line through them.
    """
    every = [bar for group in groups.values() for bar in group]
    order = list(dict.fromkeys(bar.name for bar in every))
    names = distinct(order)
    left = 16 + max((len(name) for name in names.values()), default=0) * _LETTER
    top = max((max(bar.value, bar.high or 0.0) for bar in every), default=1.0) or 1.0
    least = min((min(bar.value, 0.0) for bar in every), default=0.0)
    unit = _BARS / (top - least)
    zero = left - least * unit
    y = 70.0
    body = [_text(left, 52, label, "d")]
    for group, own in groups.items():
        if group:
            body.append(_text(12, y + 12, group, "t"))
            y += _BAR
        for bar in own:
            end = zero + bar.value * unit
            color = order.index(bar.name) % len(_COLORS) if len(groups) > 1 else 0
            body.append(_text(left - 6, y + 13, names[bar.name], anchor="end"))
            start, width = min(zero, end), max(abs(end - zero), 1.0)
            body.append(f'<rect class="f{color}" x="{_at(start)}" y="{_at(y + 1)}" width="{_at(width)}" height="16"/>')
            after = max(zero, end)
            if bar.low is not None and bar.high is not None and bar.high > bar.low:
                low, high = (zero + value * unit for value in (bar.low, bar.high))
                body.append(f'<path class="a" d="M{_at(low)} {_at(y + 9)}H{_at(high)}"/>')
                after = max(after, high)
            body.append(_text(after + 6, y + 13, _number(float(f"{bar.value:.3g}"))))
            y += _BAR
        y += 8 if group else 0
    body.append(f'<path class="a" d="M{_at(zero)} 64V{_at(y)}"/>')
    if reference is not None:
        body.append(f'<path class="a" stroke-dasharray="4 3" d="M{_at(zero + reference * unit)} 64V{_at(y)}"/>')
    _write(path, title, left + _BARS + 80, y + 12, body)


def plain(spec: str) -> str:
    """A strategy in words, without its numbers; what is no strategy, as it is."""
    name, _, rest = spec.partition(":")
    options = dict(part.split("=", 1) for part in rest.split(",") if "=" in part)
    if name == "restored":
        if options.get("source") != "latent":
            return "recomputed"
        return {"select": "latent, chosen tokens", "stream": "latent, streamed"}.get(options.get("mode", ""), "latent")
    words = {"sink_window": "window", "layer_window": "window in most layers"}.get(name, name)
    if name == "gather" and (scorer := options.get("scorer")):
        words = f"gather by {scorer}"
    return f"{words}, {options['codec']}" if options.get("codec") else words


def distinct(specs: Iterable[str]) -> dict[str, str]:
    """A name for each: its words, and the options in which it differs from others of the same words."""
    by_words: dict[str, list[str]] = {}
    for spec in dict.fromkeys(specs):
        by_words.setdefault(plain(spec), []).append(spec)
    found = {}
    for words, own in by_words.items():
        parts = {spec: set(spec.partition(":")[2].split(",")) for spec in own}
        common = set.intersection(*parts.values())
        for spec in own:
            rest = [part for part in spec.partition(":")[2].split(",") if part and part not in common]
            shown = ", ".join((words, *map(_option, rest))) if words != spec else spec
            found[spec] = shown.replace("window, window ", "window ")
    return found


# -- axes -------------------------------------------------------------------------------------------------------------


@dataclass
class _Axes:
    """A panel with its place. end: where the next one may begin."""

    panel: Panel
    left: float
    top: float
    end: float = 0.0
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        panel = self.panel
        ys = [y for course in panel.courses for y in (*course.ys, *(end for ends in course.spread for end in ends))]
        ys += [mark.y for mark in panel.marks]
        xs = [x for course in panel.courses for x in course.xs] + [mark.x for mark in panel.marks]
        if panel.reference:
            ys.append(panel.reference[0])
        if panel.is_diagonal:
            xs = ys = xs + ys
        self.x_ends = _ends(xs, None, is_log=panel.is_log_x, room=0.04 if panel.marks or panel.is_log_x else 0.0)
        if panel.places:
            self.x_ends = (-0.2, len(panel.places) - 0.8)
        self.y_ends = _ends(ys, panel.y_range, is_log=panel.is_log_y, room=0.05)
        self.y_ticks = _ticks(*self.y_ends, is_log=panel.is_log_y)
        self.names = distinct(course.name for course in panel.courses)
        self.x0 = self.left + 18 + max((len(_number(tick)) for tick in self.y_ticks), default=1) * _LETTER
        labelled = [self.names[course.name] for course in panel.courses if course.has_label]
        self.end = self.x0 + _PLOT[0] + 30 + max((len(name) for name in labelled), default=0) * _LETTER

    def x(self, value: float) -> float:
        return self.x0 + _share(value, self.x_ends, is_log=self.panel.is_log_x) * _PLOT[0]

    def y(self, value: float) -> float:
        return self.top + (1 - _share(value, self.y_ends, is_log=self.panel.is_log_y)) * _PLOT[1]

    def drawn(self) -> list[str]:
        panel, bottom, right = self.panel, self.top + _PLOT[1], self.x0 + _PLOT[0]
        body = [_text(self.left + 12, self.top - 12, panel.y_label, "d")]
        for tick in self.y_ticks:
            y = self.y(tick)
            body.append(f'<path class="g" d="M{_at(self.x0)} {_at(y)}H{_at(right)}"/>')
            body.append(_text(self.x0 - 6, y + 4, _number(tick), "d", anchor="end"))
        body += self._x_axis(bottom)
        body.append(_text(self.x0 + _PLOT[0] / 2, bottom + 40, panel.x_label, "d", anchor="middle"))
        if panel.is_diagonal:
            low, high = self.x_ends
            body.append(
                f'<path class="a" d="M{_at(self.x(low))} {_at(self.y(low))}L{_at(right)} {_at(self.y(high))}"/>'
            )
        if panel.reference:
            y = self.y(panel.reference[0])
            body.append(f'<path class="a" stroke-dasharray="4 3" d="M{_at(self.x0)} {_at(y)}H{_at(right)}"/>')
            body.append(_text(right - 4, y - 5, panel.reference[1], "d", anchor="end"))
        for place, course in enumerate(panel.courses):
            body += self._course(course, place if course.color is None else course.color)
        body += self._labels()
        return body + self._marks()

    def _x_axis(self, bottom: float) -> list[str]:
        """The axis, with as many ticks as do not touch one another: the last one first, whose place is known."""
        panel = self.panel
        ticks = panel.x_ticks or _ticks(*self.x_ends, is_log=panel.is_log_x)
        words: dict[float, str] = {tick: _number(tick) for tick in ticks}
        if panel.places:
            words = {float(place): name for place, name in enumerate(panel.places)}
        body, before = [f'<path class="a" d="M{_at(self.x0)} {_at(bottom)}h{_PLOT[0]}"/>'], math.inf
        for tick, word in sorted(words.items(), reverse=True):
            x, half = self.x(tick), len(word) * _LETTER / 2
            if x + half + 6 <= before:
                body.append(f'<path class="a" d="M{_at(x)} {_at(bottom)}v4"/>')
                body.append(_text(x, bottom + 20, word, "d", anchor="middle"))
                before = x - half
        return body

    def _course(self, course: Course, color: int) -> list[str]:
        points = [(self.x(x), self.y(y)) for x, y in zip(course.xs, course.ys, strict=True)]
        body = []
        color_class, dash = f"s{color % len(_COLORS)}", _DASHES[min(color // len(_COLORS), len(_DASHES) - 1)]
        if course.has_line and len(points) > 1:
            style = f' stroke-dasharray="{"6 3" if course.is_dashed else dash}"' if course.is_dashed or dash else ""
            coordinates = " ".join(f"{_at(x)},{_at(y)}" for x, y in points)
            body.append(f'<polyline class="{color_class}" stroke-width="1.6"{style} points="{coordinates}"/>')
        if ends := "".join(
            f"M{_at(x)} {_at(self.y(low))}V{_at(self.y(high))}"
            for (x, _), (low, high) in zip(points, course.spread, strict=bool(course.spread))
        ):
            body.append(f'<path class="{color_class}" stroke-opacity=".5" d="{ends}"/>')
        if course.has_dots or len(points) == 1:
            dots = "".join(f"M{_at(x)} {_at(y)}h0" for x, y in points)
            body.append(f'<path class="{color_class}" stroke-width="6" stroke-linecap="round" d="{dots}"/>')
        return body

    def _labels(self) -> list[str]:
        """The name of each course at its end: moved apart where ends are close, with a line to what it names."""
        ends = []
        for place, course in enumerate(self.panel.courses):
            if course.has_label and course.xs:
                last = max(range(len(course.xs)), key=lambda at: course.xs[at])
                color = (place if course.color is None else course.color) % len(_COLORS)
                ends.append((self.y(course.ys[last]), self.x(course.xs[last]), color, self.names[course.name]))
        ends.sort(key=lambda end: end[0])
        right = self.x0 + _PLOT[0] + 20
        heights = _apart([end[0] for end in ends], _LINE, self.top - 4, self.top + _PLOT[1] + 4)
        body = []
        for (y, x, color, name), height in zip(ends, heights, strict=True):
            way = f"M{_at(x + 4)} {_at(y)}L{_at(right - 4)} {_at(height)}"
            body.append(f'<path class="s{color}" stroke-opacity=".6" d="{way}"/>')
            body.append(_text(right, height + 4, name, f"f{color}"))
        return body

    def _marks(self) -> list[str]:
        """Points, each with its name where there is room for it; of two with none, the better one keeps its name."""
        marks = sorted(self.panel.marks, key=lambda mark: not mark.is_best)
        best = sorted((mark for mark in marks if mark.is_best), key=lambda mark: mark.x)
        body = []
        for mark in marks:
            self.taken.append((self.x(mark.x) - 4, self.y(mark.y) - 4, self.x(mark.x) + 4, self.y(mark.y) + 4))
        if best:
            steps = "".join(f"H{_at(self.x(mark.x))}V{_at(self.y(mark.y))}" for mark in best[1:])
            body.append(f'<path class="s0" d="M{_at(self.x(best[0].x))} {_at(self.y(best[0].y))}{steps}"/>')
        for mark in marks:
            x, y = self.x(mark.x), self.y(mark.y)
            color = "s0" if mark.is_best else "s6"
            body.append(f'<path class="{color}" stroke-width="7" stroke-linecap="round" d="M{_at(x)} {_at(y)}h0"/>')
            if (at := self._free(mark.name, x, y)) is not None:
                body.append(_text(*at, mark.name, "" if mark.is_best else "d"))
        return body

    def _free(self, name: str, x: float, y: float) -> tuple[float, float] | None:
        """Where a point's name covers nothing, and inside the panel; None where that is nowhere near."""
        width = len(name) * _LETTER
        for right, down in ((6, -4), (6, 15), (-6 - width, -4), (-6 - width, 15), (-width / 2, -9), (-width / 2, 20)):
            box = (x + right, y + down - 11, x + right + width, y + down + 3)
            inside = box[0] >= self.x0 and box[2] <= self.x0 + _PLOT[0] + 26 and self.top - 8 <= box[1]
            inside &= box[3] <= self.top + _PLOT[1]
            if inside and not any(
                box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
                for other in self.taken
            ):
                self.taken.append(box)
                return x + right, y + down
        return None


# -- scales -----------------------------------------------------------------------------------------------------------


def _ends(
    values: Sequence[float], given: tuple[float, float] | None, *, is_log: bool, room: float
) -> tuple[float, float]:
    if given is not None:
        low, high = given
        return low, high + room * (high - low or 1.0)
    if is_log:
        logs = [math.log(value) for value in values if value > 0] or [0.0]
        space = room * (max(logs) - min(logs)) or 0.1
        return math.exp(min(logs) - space), math.exp(max(logs) + space)
    low, high = min(values, default=0.0), max(values, default=1.0)
    space = room * (high - low or 1.0)
    return (low - space, high + space) if high > low or space else (low - 1, high + 1)


def _share(value: float, ends: tuple[float, float], *, is_log: bool) -> float:
    low, high = ends
    if not is_log:
        return (value - low) / (high - low)
    return math.log(max(value, low) / low) / math.log(high / low)


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    """Round numbers within: of a logarithmic axis 1, 2 and 5, or powers of ten where those are many."""
    if is_log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [float(f"{digit}e{power}") for power in powers for digit in digits]
            found = [tick for tick in found if low <= tick <= high]
            if 2 <= len(found) <= _MOST_TICKS:
                return found
        powers_of_ten = [10.0**power for power in powers if low <= 10.0**power <= high]
        if len(powers_of_ten) > _MOST_TICKS:
            return powers_of_ten[:: math.ceil(len(powers_of_ten) / _MOST_TICKS)]
    size = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(size))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * 0.999)
    return [
        round(place * step, 12) for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def _apart(wanted: Sequence[float], least: float, top: float, bottom: float) -> list[float]:
    """Places near the wanted ones, which ascend, `least` from one another; between top and bottom if they fit."""
    found: list[float] = []
    for place in wanted:
        found.append(max(place, found[-1] + least if found else top))
    limit = max(bottom, top + least * (len(found) - 1))
    for at in range(len(found) - 1, -1, -1):
        found[at] = min(found[at], limit)
        limit = found[at] - least
    return found


# -- text -------------------------------------------------------------------------------------------------------------


def _option(part: str) -> str:
    name, _, value = part.partition("=")
    value = re.sub(r"\d{4,}", lambda digits: f"{int(digits[0]):,}", value).replace("+", ", ")
    if name == "bytes_per_token":
        return f"{value} bytes"
    return f"{name.replace('_', ' ')} {value}".strip()


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.9f}".rstrip("0")


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, text: str, kind: str = "", *, anchor: str = "") -> str:
    attributes = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{_at(x)}" y="{_at(y)}"{attributes}>{html.escape(text, quote=False)}</text>'


def _write(path: Path, title: str, width: float, height: float, body: Sequence[str]) -> None:
    title = title[:1].upper() + title[1:]
    needed = 24 + len(title) * _LETTER * 1.06
    width, height = math.ceil(max(width, needed)), math.ceil(height)

    used = [number for number in range(len(_COLORS)) if re.search(rf'class="[sf]{number}"', "".join(body))]

    def shades(place: int) -> str:
        ink, dim, paper, grid = _SHADES[place]
        colors = "".join(
            f".s{one}{{stroke:{_COLORS[one][place]}}}.f{one}{{fill:{_COLORS[one][place]}}}" for one in used
        )
        return f"text{{fill:{ink}}}.d{{fill:{dim}}}.a{{stroke:{dim}}}.p{{fill:{paper}}}.g{{stroke:{grid}}}{colors}"

    fonts = f"text{{font:{_SIZE}px system-ui,sans-serif}}.t{{font-weight:600}}path,polyline{{fill:none}}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{html.escape(title)}">\n'
        f"<style>{fonts}{shades(0)}@media(prefers-color-scheme:dark){{{shades(1)}}}</style>\n"
        f'<rect class="p" width="{width}" height="{height}"/>\n'
        + "\n".join((_text(12, 26, title, "t"), *body))
        + "\n</svg>\n",
        encoding="utf-8",
    )
