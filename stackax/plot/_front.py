"""The choices of a plan: bytes against work."""

import math
from typing import TYPE_CHECKING, Any

from ._figure import BLUE, GREY, INK, VERMILION, Unit, new_figure, octaves, text_style, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {
    "keeps all": ("s", GREY),
    "keeps named values": ("o", BLUE),
    "keeps every carry": ("D", BLUE),
    "keeps some carries": ("^", BLUE),
}


def plot_front(plan: Any) -> "Figure":
    """Draws a plan's front: the least recomputation for each peak, the budget and the choice.

    Args:
        plan: A `stackax.memory.Plan`.

    Returns:
        A `matplotlib.figure.Figure`, one column of a paper wide.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> from haliax import Axis
        >>> from stackax import Stacked
        >>> from stackax.memory import plan
        >>> from stackax.plot import plot_front
        >>> layers = Stacked.init(Axis("layers", 6), eqx.nn.LayerNorm)(64)
        >>> plot_front(plan(layers, jnp.ones(64), budget_bytes="1 MiB")).axes[0].get_ylabel()
        'recomputed (forward passes)'
    """
    figure, (axes,) = new_figure(2.3)
    sizes = [point.peak_bytes for point in plan.front]
    unit = unit_of([*sizes, plan.budget_bytes])
    again = [point.forward_evaluations - 1 for point in plan.front]
    peaks = [size / unit.bytes for size in sizes]
    best = [i for i in range(len(peaks)) if not i or again[i] < min(again[:i])]
    stairs = [peaks[i] for i in best], [again[i] for i in best]
    axes.step(*stairs, where="post", color=GREY, linewidth=0.8, zorder=1)
    for kind, (marker, color) in _KINDS.items():
        mine = [i for i, point in enumerate(plan.front) if _kind(point.policy) == kind]
        if mine:
            at = [peaks[i] for i in mine], [again[i] for i in mine]
            axes.scatter(*at, s=11, marker=marker, color=color, linewidths=0, label=kind, zorder=2)
    _mark_budget(axes, plan, unit)
    _mark_choice(axes, plan, unit)
    octaves(axes, [*peaks, plan.budget_bytes / unit.bytes])
    _scale_work(axes, max(again))
    axes.set_xlabel(f"peak ({unit.name})", **text_style())
    axes.set_ylabel("recomputed (forward passes)", **text_style())
    axes.legend(loc="upper right", frameon=False, fontsize=6.5, handletextpad=0.2)
    return figure


def _kind(policy: Any) -> str:
    if not policy.recomputes:
        return "keeps all"
    if policy.slots or policy.nested:
        return "keeps some carries"
    return "keeps named values" if policy.has_names else "keeps every carry"


def _mark_budget(axes: "Axes", plan: Any, unit: Unit) -> None:
    budget = plan.budget_bytes / unit.bytes
    axes.axvline(budget, color=INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
    axes.annotate(
        "budget",
        (budget, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        va="bottom",
        **text_style(),
    )


def _mark_choice(axes: "Axes", plan: Any, unit: Unit) -> None:
    """A ring around the choice, and a line to the compiler's own figure for it, if it was asked."""
    chosen = plan.chosen
    at, again = chosen.peak_bytes / unit.bytes, chosen.forward_evaluations - 1
    name = "chosen" if plan.fits else "nearest: nothing fits"
    ring = {"s": 46, "facecolors": "none", "edgecolors": VERMILION, "linewidths": 1.2}
    axes.scatter([at], [again], label=name, zorder=3, **ring)
    if plan.compiled_peak_bytes is not None:
        compiled = plan.compiled_peak_bytes / unit.bytes
        axes.plot([at, compiled], [again, again], color=VERMILION, linewidth=0.8, zorder=1)
        cross = {"marker": "|", "s": 40, "color": VERMILION, "linewidths": 1.2}
        axes.scatter([compiled], [again], label="as compiled", zorder=3, **cross)


def _scale_work(axes: "Axes", most: float) -> None:
    """An even scale up to one forward pass; beyond two, octaves from there on."""
    if most > 2:
        axes.set_yscale("symlog", base=2, linthresh=1)
        octaves_above = [2**i for i in range(1, math.ceil(math.log2(most)) + 1)]
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1, *octaves_above])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    axes.set_ylim(bottom=-0.05 * min(1, most) or None)
