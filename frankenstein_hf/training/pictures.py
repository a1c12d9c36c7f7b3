"""Pictures in one style: names stand at their curves, groups get a panel each, tables become heat maps.

Everything this project draws is drawn here: the loss of a run and the plots of the scripts. There is no legend that
could hide a curve, and no display is needed. matplotlib is imported when a picture is begun.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.atomic import write_bytes
from ..hub.foreign import one_line

# Colours that people with a colour vision deficiency can tell apart (Okabe and Ito), the palest left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BEHIND = "0.85"  # curves of other groups
QUIET = "0.45"  # lines to compare with
MARKER, LINE = 4, 1.4  # sizes in points
TEXT = 9  # size of titles and axes' labels, in points
LABEL = 7.5  # size of names at curves, in points
SPACING = 1.5 * LABEL  # from one name to the next
TITLE = 90  # most characters of a title

Points = Sequence[Sequence[float]]


class Picture:
    """A figure of one or more panels.

    Args:
        title: Stands above all panels; what it is a picture of. Shortened to one line.
        panels: How many panels.
        columns: Most panels in a row.
        size: Width and height of a panel in inches.
        share: Whether all panels have the same axes.

    Attributes:
        panels: matplotlib's axes, in reading order.

    Raises:
        ImportError: matplotlib is not installed.
    """

    def __init__(
        self, title: str, panels: int = 1, columns: int = 3, size: tuple[float, float] = (6.4, 4.0), share: bool = False
    ) -> None:
        try:
            from matplotlib.figure import Figure  # without pyplot: no display, no state
        except ImportError as error:
            raise ImportError("Pictures need matplotlib: pip install 'frankenstein_hf[plots]'.") from error
        columns = min(columns, panels)
        rows = -(-panels // columns)
        self.figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        grid = self.figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share).flatten()
        self.panels = list(grid[:panels])
        for axes in grid[panels:]:
            axes.set_visible(False)
        for axes in self.panels:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
            axes.tick_params(labelsize=LABEL, labelbottom=True, labelleft=True)  # also where a panel below is left out
            axes.xaxis.label.set_size(TEXT)
            axes.yaxis.label.set_size(TEXT)
        title = one_line(title)
        title = title if len(title) <= TITLE else f"{title[: TITLE - 1]}…"
        if panels == 1:
            self.heading(self.panels[0], title)
        else:
            self.figure.suptitle(title, parse_math=False, fontsize=TEXT + 2)
        self._names: list[tuple[Any, Any]] = []  # axes and the name at the end of a curve in it

    def heading(self, axes: Any, title: str) -> None:
        """The title of a panel."""
        axes.set_title(title, loc="left", parse_math=False, fontsize=TEXT)

    def curve(
        self, axes: Any, name: str, points: Points, colour: str = COLOURS[0], style: str = "o-", **options: Any
    ) -> None:
        """A curve with its name at its end; a point that is not finite leaves a gap.

        Args:
            axes: The panel.
            name: Stands at the last finite point, in the curve's colour.
            points: [x, y] each; without any, nothing is drawn.
            colour, style, **options: As matplotlib's `plot` takes them.
        """
        if not points:
            return
        options = {"markersize": MARKER, "linewidth": LINE, "label": name, **options}
        axes.plot([x for x, *_ in points], [y for _, y, *_ in points], style, color=colour, **options)
        finite = [(x, y) for x, y, *_ in points if math.isfinite(x) and math.isfinite(y)]
        if finite:
            self.name(axes, name, finite[-1], colour)

    def name(self, axes: Any, name: str, point: Sequence[float], colour: str = COLOURS[0]) -> None:
        """A name to the right of a point; `save` moves names apart that would lie on each other."""
        text = axes.annotate(
            name, tuple(point), xytext=(5, 0), textcoords="offset points", color=colour, fontsize=LABEL, va="center",
            parse_math=False, annotation_clip=False,
        )  # fmt: skip
        self._names.append((axes, text))

    def level(self, axes: Any, name: str, y: float) -> None:
        """A dashed line across a panel to compare with."""
        axes.axhline(y, color=QUIET, linestyle="--", linewidth=1, label=name)
        axes.annotate(
            name, (0, y), xycoords=("axes fraction", "data"), xytext=(4, 3), textcoords="offset points", color=QUIET,
            fontsize=LABEL, parse_math=False,
        )  # fmt: skip

    def multiples(
        self, groups: Mapping[str, Mapping[str, Points]], panels: Iterable[Any] | None = None, style: str = "o-"
    ) -> None:
        """A panel a group: its curves in colour with their names, those of all others grey behind them.

        Args:
            groups: Title of a panel -> name of a curve -> its points.
            panels: Where to draw; by default all.
        """
        for (title, curves), axes in zip(groups.items(), self.panels if panels is None else panels):
            self.heading(axes, title)
            for other in groups.values():
                for points in other.values() if other is not curves else ():
                    axes.plot([p[0] for p in points], [p[1] for p in points], color=BEHIND, linewidth=0.8, zorder=1)
            for i, (name, points) in enumerate(curves.items()):
                self.curve(axes, name, points, COLOURS[i % len(COLOURS)], style, zorder=2)

    def dots(self, axes: Any, values: Mapping[str, float], label: str) -> None:
        """One number each for many things: a row a thing, from top to bottom, and a dot at its number."""
        axes.plot(list(values.values()), range(len(values)), "o", color=COLOURS[0], markersize=MARKER)
        axes.set_yticks(range(len(values)), labels=list(values))
        axes.set_ylim(len(values) - 0.5, -0.5)
        axes.set_xlabel(label)

    def heat_map(
        self, axes: Any, values: Mapping[str, Sequence[float | None]], columns: Sequence[str], label: str
    ) -> None:
        """A table of shares between 0 and 1 as colours, each cell with its number.

        Args:
            axes: The panel.
            values: A row's name -> one share for each column, None where there is none.
            columns: Names of the columns.
            label: What the columns are.
        """
        table = [[math.nan if value is None else value for value in row] for row in values.values()]
        axes.imshow(table, cmap="cividis", vmin=0.0, vmax=1.0, aspect="auto")
        axes.grid(False)
        axes.set_xticks(range(len(columns)), labels=columns)
        axes.set_yticks(range(len(values)), labels=list(values))
        axes.tick_params(length=0)
        axes.set_xlabel(label)
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                text = "not run" if math.isnan(value) else f"{value:.0%}"
                colour = QUIET if math.isnan(value) else "white" if value < 0.5 else "black"
                axes.text(x, y, text, ha="center", va="center", fontsize=LABEL, color=colour)

    def save(self, path: Path) -> None:
        """Write a file of the kind its name ends in (PNG without an ending), or leave what was there."""
        self.figure.draw_without_rendering()  # decides where the panels are
        for axes in self.panels:
            self._part_names(axes)
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format=path.suffix[1:] or "png", dpi=100)
        write_bytes(path, buffer.getvalue())

    def _part_names(self, axes: Any) -> None:
        """Move names of one panel apart that end at the same place; others stay beside their points."""
        columns: dict[float, list[tuple[float, Any]]] = {}
        points_per_pixel = 72 / self.figure.dpi
        for text in (text for owner, text in self._names if owner is axes):
            x, y = axes.transData.transform(text.xy) * points_per_pixel
            near = next((key for key in columns if abs(key - x) < 8 * LABEL), x)
            columns.setdefault(near, []).append((float(y), text))
        for names in columns.values():
            places = spread([y for y, _ in names], SPACING)
            for (y, text), place in zip(names, places):
                text.xyann = (5, place - y)


def lengths_below(axes: Any, values: Sequence[int], label: str) -> None:
    """A logarithmic axis below a panel with a tick at each of these values."""
    axes.set(xscale="log", xlabel=label)
    axes.minorticks_off()
    axes.set_xticks(values, labels=[str(value) for value in values])


def spread(places: Sequence[float], distance: float) -> list[float]:
    """The places in the same order, at least `distance` apart, and moved as little as possible (least squares)."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    runs: list[list[float]] = []  # [mean of its places as if the run began at 0, number of places]
    for i in order:
        runs.append([places[i], 1])
        while len(runs) > 1 and runs[-2][0] + runs[-2][1] * distance > runs[-1][0]:
            start, count = runs.pop()
            mean, before = runs[-1]
            runs[-1] = [(mean * before + (start - before * distance) * count) / (before + count), before + count]
    spaced = [start + i * distance for start, count in runs for i in range(int(count))]
    result = [0.0] * len(places)
    for place, i in zip(spaced, order):
        result[i] = place
    return result
