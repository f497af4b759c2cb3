"""Policies beside each other: what each of them needs, and what it costs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._figure import BLUE, GREY, VERMILION, legend_above, new_figure, octaves, text_style, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW_INCHES = 0.16


def plot_tradeoffs(rows: Sequence[Any]) -> "Figure":
    """Draws policies as rows of dots: temporary memory on the left, time or work on the right.

    Args:
        rows: One for each policy, with the attributes `policy` (what to call it),
            `estimated_temp_bytes`, `compiled_temp_bytes`, `forward_evaluations`, and
            `relative_time`, which may be None; then the forward passes are drawn instead.

    Returns:
        A `matplotlib.figure.Figure`, one column of a paper wide.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There are no rows.

    Example:
        >>> from types import SimpleNamespace as Row
        >>> from stackax.plot import plot_tradeoffs
        >>> rows = [
        ...     Row(policy="none", estimated_temp_bytes=9e6, compiled_temp_bytes=8e6,
        ...         forward_evaluations=1.0, relative_time=1.0),
        ...     Row(policy="full", estimated_temp_bytes=2e6, compiled_temp_bytes=2e6,
        ...         forward_evaluations=1.8, relative_time=1.2),
        ... ]
        >>> [axes.get_xlabel() for axes in plot_tradeoffs(rows).axes]
        ['temporary\\nmemory (MiB)', 'time of a step\\n(none = 1)']
    """
    if not rows:
        raise ValueError("plot_tradeoffs has no rows to draw: give one for each policy")
    rows = sorted(rows, key=lambda row: -row.compiled_temp_bytes)
    figure, (memory, work) = new_figure(0.75 + _ROW_INCHES * len(rows), panels=2)
    _draw_memory(memory, rows)
    _draw_work(work, rows)
    memory.set_yticks(range(len(rows)), [row.policy for row in rows])
    memory.set_ylim(len(rows) - 0.5, -0.5)
    for axes in (memory, work):
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", color=GREY, alpha=0.35, linewidth=0.4)
    legend_above(figure, memory)
    return figure


def _draw_memory(axes: "Axes", rows: Sequence[Any]) -> None:
    unit = unit_of(row.compiled_temp_bytes for row in rows)
    compiled = [row.compiled_temp_bytes / unit.bytes for row in rows]
    estimated = [row.estimated_temp_bytes / unit.bytes for row in rows]
    places = range(len(rows))
    axes.scatter(compiled, places, s=16, color=BLUE, linewidths=0, label="compiled", zorder=2)
    ring = {"s": 30, "facecolors": "none", "edgecolors": VERMILION, "linewidths": 0.9}
    axes.scatter(estimated, places, label="estimated", zorder=3, **ring)
    octaves(axes, [*compiled, *estimated])
    axes.set_xlabel(f"temporary\nmemory ({unit.name})", **text_style())


def _draw_work(axes: "Axes", rows: Sequence[Any]) -> None:
    is_timed = all(row.relative_time is not None for row in rows)
    work = [row.relative_time if is_timed else row.forward_evaluations for row in rows]
    axes.scatter(work, range(len(rows)), s=16, color=BLUE, linewidths=0, zorder=2)
    axes.set_xlim(0, 1.1 * max(work))
    unit = next((f"{row.policy} = 1" for row in rows if row.relative_time == 1), "relative")
    label = f"time of a step\n({unit})" if is_timed else "forward passes\nof a step"
    axes.set_xlabel(label, **text_style())
