"""What a backward pass keeps, as bars."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ._figure import BLUE, GREY, ORANGE, legend_above, new_figure, show_bytes, text_style, unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_UNNAMED = 6
# Of the largest bar; what has a name is drawn however small.
_NEGLIGIBLE = 0.02
_BAR_INCHES = 0.17


class Bar(NamedTuple):
    """Values that are drawn together.

    Attributes:
        label: What to call them.
        bytes: Their bytes.
        memory: Where they are kept, `"device"` or `"host"`.
        is_named: Whether the label is a `checkpoint_name`.
    """

    label: str
    bytes: int
    memory: str
    is_named: bool


def plot_residuals(report: Any) -> "Figure":
    """Draws what the backward pass keeps beside the arguments: all names, and the largest others.

    Args:
        report: A `stackax.memory.Report`.

    Returns:
        A `matplotlib.figure.Figure`, one column of a paper wide: `figure.savefig("kept.pdf")`.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from stackax.memory import explain
        >>> from stackax.plot import plot_residuals
        >>> figure = plot_residuals(explain(lambda x: jnp.sin(x).sum(), jnp.ones(256)))
        >>> figure.axes[0].get_xlabel()
        'kept for the backward pass (KiB)'
    """
    bars = list(_bars(report.residuals)) or [Bar("nothing", 0, "device", False)]
    figure, (axes,) = new_figure(0.55 + _BAR_INCHES * len(bars))
    unit = unit_of(bar.bytes for bar in bars)
    for place, bar in enumerate(bars):
        is_host = bar.memory == "host"
        axes.barh(
            place,
            bar.bytes / unit.bytes,
            height=0.68,
            color=ORANGE if is_host else BLUE if bar.is_named else GREY,
            hatch="////" if is_host else None,
            edgecolor="white",
            linewidth=0,
            label=_kind(bar),
        )
        size = f" {show_bytes(bar.bytes)}"
        axes.text(bar.bytes / unit.bytes, place, size, va="center", **text_style())
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * max(1, *(bar.bytes for bar in bars)) / unit.bytes)
    axes.set_xlabel(f"kept for the backward pass ({unit.name})", **text_style())
    legend_above(figure, axes)
    return figure


def _bars(residuals: Any) -> Iterator[Bar]:
    """One for each name, for each of the largest others, and for the rest; the largest first."""
    sizes: dict[tuple[str, str, bool], int] = {}
    for r in residuals:
        if r.kind != "argument":
            key = (r.name or _unnamed(r), r.memory, r.name is not None)
            sizes[key] = sizes.get(key, 0) + r.bytes
    bars = sorted((Bar(k[0], size, *k[1:]) for k, size in sizes.items()), key=lambda b: -b.bytes)
    unnamed = [bar for bar in bars if not bar.is_named]
    small = [bar for bar in unnamed if bar.bytes < _NEGLIGIBLE * bars[0].bytes]
    rest = [bar for bar in unnamed if bar in small or bar in unnamed[_MOST_UNNAMED:]]
    rest = rest if len(rest) > 1 else []
    yield from (bar for bar in bars if bar not in rest)
    for memory in dict.fromkeys(bar.memory for bar in rest):
        smaller = [bar for bar in rest if bar.memory == memory]
        total = sum(bar.bytes for bar in smaller)
        yield Bar(f"{len(smaller)} smaller", total, memory, False)


def _unnamed(r: Any) -> str:
    """What it is, and the line of the user's code that makes it, without the folders."""
    line = r.source.split(" ")[0].rsplit("/")[-1]
    return f"{r.label}, {line}" if line else r.label


def _kind(bar: Bar) -> str:
    if bar.memory == "host":
        return "on the host"
    return "with a name" if bar.is_named else "without a name"
