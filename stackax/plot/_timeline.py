"""The live bytes of a step, in program order."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ._figure import BLUE, GREY, INK, SKY, VERMILION, legend_above, new_figure, text_style, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOP_WIDTH = 4.0
_OTHER_WIDTH = 1.0


class Stretch(NamedTuple):
    """A part of a step: a loop, or the operations between two loops.

    Attributes:
        levels: Live bytes, one after the other.
        is_loop: Whether it is a loop, of which the levels are entry, body and exit.
        is_backward: Whether it comes after the forward pass.
    """

    levels: list[int]
    is_loop: bool
    is_backward: bool


def plot_timeline(report: Any) -> "Figure":
    """Draws the estimated live bytes through a step, the backward pass told apart.

    The floor is what lives all the time: arguments and outputs. Loops, which run long, are drawn
    wide; a loop's level is the most that one of its trips needs.

    Args:
        report: A `stackax.memory.Report`.

    Returns:
        A `matplotlib.figure.Figure`, one column of a paper wide.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from stackax.memory import explain
        >>> from stackax.plot import plot_timeline
        >>> figure = plot_timeline(explain(lambda x: jnp.sin(x @ x).sum(), jnp.ones((64, 64))))
        >>> figure.axes[0].get_ylabel()
        'live memory (KiB)'
    """
    figure, (axes,) = new_figure(2.1)
    stretches = list(_stretches(report.peak.timeline))
    floor = report.peak.argument_bytes + report.peak.output_bytes
    highest = max((level for stretch in stretches for level in stretch.levels), default=0)
    unit = unit_of([floor + highest])
    base, end = floor / unit.bytes, 0.0
    for stretch in stretches:
        start, end = end, end + (_LOOP_WIDTH if stretch.is_loop else _OTHER_WIDTH)
        edges = list(_edges(stretch, start, end))
        levels = [base + level / unit.bytes for level in stretch.levels]
        label = "backward pass" if stretch.is_backward else "forward pass"
        color = BLUE if stretch.is_backward else SKY
        axes.stairs(levels, edges, baseline=base, fill=True, color=color, label=label, linewidth=0)
        if highest in stretch.levels:
            place = stretch.levels.index(highest)
            _mark_peak(axes, (edges[place] + edges[place + 1]) / 2, max(levels), unit.name)
    axes.fill_between(
        [0, end], base, color=GREY, alpha=0.45, linewidth=0, label="arguments, outputs"
    )
    axes.set_xlim(0, max(end, 1.0))
    axes.set_ylim(0, 1.18 * (base + highest / unit.bytes))
    axes.set_xticks([])
    axes.set_xlabel("operations of a step, in order", **text_style())
    axes.set_ylabel(f"live memory ({unit.name})", **text_style())
    legend_above(figure, axes)
    return figure


def _stretches(timeline: Iterable[Any]) -> Iterator[Stretch]:
    """The timeline's loops, and what runs between them."""
    moments = list(timeline)
    loops = sum(_is_body(moment) for moment in moments)
    seen, between = 0, []
    for moment in moments:
        if moment.where.endswith(": entry"):
            if between:
                yield Stretch(between, False, _is_past_half(seen, loops))
            between = [moment.live_bytes]
        elif _is_body(moment):
            between.append(moment.live_bytes)
            seen += 1
        elif moment.where.endswith(": exit"):
            yield Stretch([*between, moment.live_bytes], True, _is_past_half(seen - 1, loops))
            between = []
        else:
            between.append(moment.live_bytes)
    if between:
        yield Stretch(between, False, _is_past_half(seen, loops))


def _is_body(moment: Any) -> bool:
    return moment.where.endswith(": body")


def _is_past_half(loops_before: int, loops: int) -> bool:
    """Whether the backward pass has begun: each loop of the forward pass has one of its own."""
    return loops > 1 and 2 * loops_before >= loops


def _edges(stretch: Stretch, start: float, end: float) -> Iterator[float]:
    """Where the stretch's levels begin, and its end; a loop's body takes most of it."""
    count = len(stretch.levels)
    if not stretch.is_loop:
        yield from (start + (end - start) * i / count for i in range(count + 1))
        return
    margin = (end - start) / 16
    yield from (start, start + margin, end - margin, end)


def _mark_peak(axes: "Axes", at: float, level: float, unit: str) -> None:
    axes.plot([at], [level], marker="v", color=VERMILION, markersize=3.5, linestyle="none")
    axes.annotate(
        f"{level:.4g} {unit}",
        (at, level),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        **text_style(color=INK),
    )
