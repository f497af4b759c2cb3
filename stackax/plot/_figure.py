"""What all pictures have in common: matplotlib, a paper's column, plain axes and units of bytes."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_INCHES = 3.4
FONT_POINTS = 7.0
# Okabe and Ito's palette, which survives all common forms of colour blindness.
BLUE, ORANGE, VERMILION, SKY = "#0072B2", "#E69F00", "#D55E00", "#56B4E9"
GREY, INK = "#8A8A8A", "#222222"

# Beyond this ratio of the largest size to the smallest, octaves are easier to read.
_WIDE = 4
_MOST_TICKS = 4


class Unit(NamedTuple):
    """A unit of memory.

    Attributes:
        name: Its name, such as `"MiB"`.
        bytes: Its size.
    """

    name: str
    bytes: int


def unit_of(sizes: Iterable[float]) -> Unit:
    """The largest binary unit of which the largest size is at least one."""
    largest = max(sizes, default=0)
    units = [Unit("B", 1)] + [Unit(f"{p}iB", 2 ** (10 * i)) for i, p in enumerate("KMGT", 1)]
    return next((unit for unit in reversed(units) if largest >= unit.bytes), units[0])


def show_bytes(size: float) -> str:
    """A number of bytes in its own unit, with three digits."""
    unit = unit_of([size])
    return f"{size / unit.bytes:.3g} {unit.name}"


def octaves(axes: "Axes", sizes: Iterable[float]) -> None:
    """Makes the horizontal axis logarithmic, in octaves, where sizes are far apart."""
    least, most = min(sizes := list(sizes)), max(sizes)
    if most <= _WIDE * least or least <= 0:
        return
    axes.set_xscale("log", base=2)
    first, last = math.ceil(math.log2(least)), math.floor(math.log2(most))
    axes.set_xticks([2.0**i for i in range(first, last + 1, 1 + (last - first) // _MOST_TICKS)])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def legend_above(figure: "Figure", *axes: "Axes", columns: int = 3) -> None:
    """Tells apart what has labels, each once, where there is more than one."""
    found = [each.get_legend_handles_labels() for each in axes]
    kinds = {label: handle for pair in found for handle, label in zip(*pair, strict=True)}
    if len(kinds) > 1:
        figure.legend(
            kinds.values(),
            kinds.keys(),
            loc="outside upper center",
            ncols=min(columns, len(kinds)),
            frameon=False,
            fontsize=FONT_POINTS - 0.5,
            handlelength=1.2,
            handletextpad=0.5,
            columnspacing=1.2,
        )


def new_figure(height_inches: float, panels: int = 1, rows: int = 1) -> "tuple[Figure, list[Axes]]":
    """An empty figure, one column wide, that belongs to no window.

    Args:
        height_inches: Its height.
        panels: The number of axes beside each other, which share what is on the vertical one.
        rows: The number of axes on top of each other, which share what is on the horizontal one.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("stackax.plot needs matplotlib: pip install 'stackax[plot]'") from error
    figure = Figure(figsize=(COLUMN_INCHES, height_inches), dpi=200, layout="constrained")
    axes = figure.subplots(rows, panels, sharex="col", sharey="row", squeeze=False).ravel()
    for each in axes:
        _strip(each)
    return figure, list(axes)


def text_style(**style: Any) -> dict[str, Any]:
    """The arguments of a text in a picture."""
    return {"fontsize": FONT_POINTS, "color": INK, **style}


def _strip(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(linewidth=0.6, color=INK)
    axes.tick_params(labelsize=FONT_POINTS, width=0.6, length=2.5, colors=INK)
    axes.set_axisbelow(True)
