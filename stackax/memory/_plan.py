"""Choosing a policy: the least recomputation whose peak fits a budget."""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from rich.console import RenderableType
from rich.jupyter import JupyterMixin

from .. import _jax
from .._policy.policy import ScanCheckpointPolicy
from ..plot import plot_front
from ._bytes import bytes_of, parse_bytes, show_bytes
from ._measure import compiled_bytes
from ._program import Call, as_call, as_step, compile_step
from ._search import Point, Search
from ._show import as_text, front_table


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(JupyterMixin):
    """The policy that fits a budget, and what it was chosen from. Prints as a table.

    Attributes:
        budget_bytes: The budget.
        fits: Whether any choice fits it. If not, the chosen one is that of the least peak.
        chosen: The choice.
        front: The choices that no other beats in peak, recomputation and bytes on the host, and
            the chosen one; the least peak first.
        considered: How many choices were traced.
        compiled_peak_bytes: The compiler's figure for the choice, if it was asked.
        reason: Why this choice, in words.
    """

    budget_bytes: int
    fits: bool
    chosen: Point
    front: tuple[Point, ...]
    considered: int
    compiled_peak_bytes: int | None
    reason: str

    @property
    def policy(self) -> ScanCheckpointPolicy:
        """The policy to use, as `remat=` or `gradient_checkpointing=`."""
        return self.chosen.policy

    @property
    def least(self) -> Point:
        """The choice with the least peak of all."""
        return self.front[0]

    def to_dict(self) -> dict[str, Any]:
        """The plan as dictionaries, lists, strings and numbers, fit for JSON, sizes in bytes."""
        return {
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "chosen": _row(self.chosen),
            "front": [_row(point) for point in self.front],
            "considered": self.considered,
            "compiled_peak_bytes": self.compiled_peak_bytes,
            "reason": self.reason,
        }

    def plot(self) -> Any:
        """Draws the front and the choice, with `stackax.plot.plot_front`.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return plot_front(self)

    def __rich__(self) -> RenderableType:
        return front_table(self)

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def plan(
    fn_or_stack: Any,
    *args: Any,
    budget_bytes: int | str,
    argnums: int | Sequence[int] | None = None,
    offload: bool | None = None,
    verify: bool = False,
) -> Plan:
    """Chooses the policy that recomputes least while a step's peak fits a budget.

    The peak is that of `jax.value_and_grad`, jitted without donation: arguments (the weights among
    them), outputs (their gradients) and temporary memory. What else must fit, such as the state of
    an optimizer, is for the caller to take off the budget.

    It chooses from: no remat; every subset of the names in the layers (of more than 10, those that
    save most for their bytes), kept on the device or in part on the host; and loops that keep only
    some of the carries (`slots`). What a subset keeps and repeats is read off one layer's
    equations; what seems to be the best for some budget is traced, and none is compiled. All
    stacks among the arguments get the same policy.

    Args:
        fn_or_stack: As in `explain`. The stacks to plan for are among its arguments.
        *args: What it is called with: arrays, shapes, NamedArrays and pytrees of them.
        budget_bytes: The budget: a number of bytes, or a text such as `"64MiB"`.
        argnums: Which arguments are differentiated, as in `jax.grad`; None means all.
        offload: Whether values may be kept in the host's memory. None means where the backend has
            one of its own, which the CPU has not.
        verify: Compile what may fit, beginning with what repeats least, until the compiler's own
            peak is within the budget. Mostly that is one program or two.

    Returns:
        The plan. Where nothing fits, its `fits` is False, and it says what comes nearest.

    Raises:
        TypeError: As `explain`; or no argument holds a stack of this library.
        ValueError: As `explain`; or the budget is below the arguments alone.

    Example:
        >>> import equinox as eqx, haliax as hax, jax
        >>> from stackax import Stacked
        >>> from stackax.memory import plan
        >>> from stackax.transformer import TransformerBlock, TransformerConfig
        >>> config = TransformerConfig(layers=8, width=64, heads=4, vocab_size=256, seq_len=64)
        >>> make = Stacked.init(config.Layers, TransformerBlock)
        >>> stack = eqx.filter_eval_shape(lambda key: make(config, key=key), jax.random.key(0))
        >>> x = eqx.filter_eval_shape(lambda: hax.zeros({"batch": 4, "position": 64, "embed": 64}))
        >>> plan(stack, x, budget_bytes="8 MiB").fits
        True
    """
    budget = parse_bytes(budget_bytes)
    call = as_call(fn_or_stack, args, "plan")
    if not call.stacks:
        raise TypeError(
            "plan has no policy to choose: no argument holds a stackax.Stacked or "
            "stackax.BlockSeq. Pass the stack as an argument, not in a closure"
        )
    _check_budget(as_step(call, argnums, "plan").shapes, budget)
    return _choose(call, argnums, budget, Search(call, argnums, offload), verify)


def _choose(
    call: Call, argnums: int | Sequence[int] | None, budget: int, search: Search, verify: bool
) -> Plan:
    """What repeats least of what fits, as estimated or as compiled."""
    compiled: dict[ScanCheckpointPolicy, int] = {}
    if verify:
        best = _first_that_compiles_within(call, argnums, budget, search, compiled)
        nearest = min(search.front, key=lambda p: (compiled.get(p.policy, _UNKNOWN), p.peak_bytes))
    else:
        best, nearest = search.best(budget), search.front[0]
    chosen = best or nearest
    front = sorted({*search.front, chosen}, key=lambda point: point.peak_bytes)
    return Plan(
        budget_bytes=budget,
        fits=best is not None,
        chosen=chosen,
        front=tuple(front),
        considered=search.considered,
        compiled_peak_bytes=compiled.get(chosen.policy),
        reason=_reason(search, chosen, best is not None, compiled),
    )


_UNKNOWN = sys.maxsize
# How many choices are compiled whose estimate is over the budget, in the hope that it is too high.
_MOST_OVER = 5


def _first_that_compiles_within(
    call: Call,
    argnums: int | Sequence[int] | None,
    budget: int,
    search: Search,
    compiled: dict[ScanCheckpointPolicy, int],
) -> Point | None:
    """The first of what may fit whose compiled peak does, which goes into `compiled`."""
    least, *front = search.front
    low_enough = (point for point in front if _least_peak(point) <= budget)
    near = _with_few_over(search.near(budget), budget)
    for point in itertools.chain(near, [least], low_enough):
        if point.policy in compiled:
            continue
        figures = compiled_bytes(compile_step(call.with_remat(point.policy), argnums, "plan"))
        peak = sum(figures[f"{part}_bytes"] for part in ("argument", "output", "temp"))
        compiled[point.policy] = peak
        if peak <= budget:
            return point
    return None


def _with_few_over(points: Iterable[Point], budget: int) -> Iterator[Point]:
    """The points, but of those whose estimate is over the budget only the first few."""
    over = 0
    for point in points:
        over += point.peak_bytes > budget
        if point.peak_bytes <= budget or over <= _MOST_OVER:
            yield point


def _least_peak(point: Point) -> int:
    """The peak at the low end of the band."""
    return point.peak_bytes - point.temp_bytes + point.low_bytes


def _reason(
    search: Search, point: Point, fits: bool, compiled: dict[ScanCheckpointPolicy, int]
) -> str:
    figure = f"its peak is estimated at {show_bytes(point.peak_bytes)}"
    if point.policy in compiled:
        figure += f", and compiled at {show_bytes(compiled[point.policy])}"
    if not fits:
        return (
            f"Nothing fits. Of {search.considered} choices, {point.policy} needs the least: "
            f"{figure}. Give more, or make the batch or the sequence smaller."
        )
    reason = (
        f"Of {search.considered} choices, {point.policy} repeats the least of the forward pass, "
        f"{point.forward_evaluations - 1:.2f} of it, among those that fit: {figure}."
    )
    less = [other for other in search.front if other.recomputed_flops < point.recomputed_flops]
    if less:
        after = less[0]
        reason += (
            f" The next, {after.policy}, repeats {after.forward_evaluations - 1:.2f} and needs "
            f"{show_bytes(compiled.get(after.policy, after.peak_bytes))}."
        )
    return reason


def _check_budget(arguments: Sequence[Any], budget: int) -> None:
    needed = sum(bytes_of(x) for x in arguments if not _jax.is_on_host(jax.typeof(x)))
    if budget < needed:
        raise ValueError(
            f"budget_bytes={budget} ({show_bytes(budget)}) is below the arguments alone, weights "
            f"and inputs of {show_bytes(needed)}, which no policy makes smaller: give more, or "
            "shard them"
        )


def _row(point: Point) -> dict[str, Any]:
    return {**point._asdict(), "policy": repr(point.policy)}
