"""Choosing a policy: the least recomputation whose peak fits a budget."""

import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from rich.console import RenderableType
from rich.jupyter import JupyterMixin

from .._loop.schedule import optimal_evaluations
from .._policy.names import names_unchecked
from .._policy.policy import ScanCheckpointPolicy
from ..plot import plot_front
from ._bytes import parse_bytes, show_bytes
from ._choices import layers_of, policies_to_try
from ._cost import forward_cost, step_cost
from ._measure import compiled_bytes
from ._peak import estimate_peak
from ._program import Argument, Call, as_call, as_step, compile_step, trace
from ._show import as_text, front_table


class Point(NamedTuple):
    """A policy, and what a step under it is estimated to need.

    Attributes:
        policy: The policy.
        peak_bytes: Arguments, outputs and temporary memory.
        temp_bytes: Temporary memory.
        low_bytes, high_bytes: The band in which the compiler's `temp_bytes` is expected.
        offloaded_bytes: What is kept in the host's memory instead.
        recomputed_flops: Operations that the backward pass repeats.
        forward_evaluations: How often the forward pass's operations run, 1 without recomputation.
    """

    policy: ScanCheckpointPolicy
    peak_bytes: int
    temp_bytes: int
    low_bytes: int
    high_bytes: int
    offloaded_bytes: int
    recomputed_flops: float
    forward_evaluations: float


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(JupyterMixin):
    """The policy that fits a budget, and what it was chosen from. Prints as a table.

    Attributes:
        budget_bytes: The budget.
        fits: Whether any choice fits it. If not, the chosen one is that of the least peak.
        chosen: The choice.
        front: The choices that no other beats in both peak and recomputation, the least peak first.
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

    It chooses from: no remat; every subset of the names in the layers, of which a walk over one
    layer's equations leaves those that no other beats in both bytes and operations; and loops that
    keep only some of the carries (`slots`). Each of these is traced, none is compiled. All stacks
    among the arguments get the same policy.

    Args:
        fn_or_stack: As in `explain`. The stacks to plan for are among its arguments.
        *args: What it is called with: arrays, shapes, NamedArrays and pytrees of them.
        budget_bytes: The budget: a number of bytes, or a text such as `"64MiB"`.
        argnums: Which arguments are differentiated, as in `jax.grad`; None means all.
        offload: Whether values may be kept in the host's memory. None means where the backend has
            one of its own, which the CPU has not.
        verify: Compile the choice, and go along the front until the compiler's own peak fits and
            that of the next choice doesn't.

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
    _check_budget(as_step(call, argnums, "plan").arguments, budget)
    points = choices(call, argnums, offload)
    front = pareto_front(points)
    return _choose(call, argnums, budget, front, len(points), verify)


def choices(call: Call, argnums: int | Sequence[int] | None, offload: bool | None) -> list[Point]:
    """Every choice of a plan, traced."""
    may_offload = jax.default_backend() != "cpu" if offload is None else offload
    with names_unchecked():  # they were just read
        plain = trace(call.with_remat("none"), argnums, "plan")
        length = max(stack.Block.size for stack in call.stacks)
        match_names = "all" if len(call.stacks) == 1 else "any"
        policies = list(policies_to_try(layers_of(plain), length, match_names, may_offload))
        known = _Interpolated(call, argnums, length)
        return [known.point(p) if p.slots else _point(p, call, argnums) for p in policies]


class _Interpolated:
    """Points of `slots=k`, of which two give all others from 2 slots on.

    A slot more is one carry more, and the operations repeated are those of a layer for each step
    that the schedule advances: both are laws of the loop (`tests/laws/`).
    """

    def __init__(self, call: Call, argnums: int | Sequence[int] | None, length: int) -> None:
        self._trace = ft.cache(lambda policy: _point(policy, call, argnums))
        self._length = length
        self._is_law = all(stack.Block.size == length for stack in call.stacks)

    def point(self, policy: ScanCheckpointPolicy) -> Point:
        """The point of a policy with slots."""
        slots, most = policy.slots, self._length - 1
        assert slots is not None
        if not self._is_law or not 2 < slots < most:
            return self._trace(policy)
        few, many = (self._trace(dataclasses.replace(policy, slots=k)) for k in (2, most))
        of_slots = (slots - 2) / (most - 2)
        steps = [self._advanced(k) for k in (2, slots, most)]
        of_steps = (steps[0] - steps[1]) / (steps[0] - steps[2])
        numbers = {
            name: _between(few, many, name, of_steps if name in _REPEATED else of_slots)
            for name in Point._fields[1:]
        }
        return Point(policy, **numbers)

    def _advanced(self, slots: int) -> int:
        return optimal_evaluations(self._length, slots)


_REPEATED = ("recomputed_flops", "forward_evaluations")


def _between(few: Point, many: Point, name: str, share: float) -> Any:
    a, b = getattr(few, name), getattr(many, name)
    return type(a)(round(a + share * (b - a)) if isinstance(a, int) else a + share * (b - a))


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both peak and recomputation, the least peak first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.recomputed_flops)):
        if not front or point.recomputed_flops < front[-1].recomputed_flops:
            front.append(point)
    return front


def _point(policy: ScanCheckpointPolicy, call: Call, argnums: int | Sequence[int] | None) -> Point:
    program = trace(call.with_remat(policy), argnums, "plan")
    peak, again = estimate_peak(program.step), step_cost(program).recomputed_flops
    forward = forward_cost(program).flops
    return Point(
        policy=policy,
        peak_bytes=peak.argument_bytes + peak.output_bytes + peak.temp_bytes,
        temp_bytes=peak.temp_bytes,
        low_bytes=peak.low_bytes,
        high_bytes=peak.high_bytes,
        offloaded_bytes=peak.host_bytes,
        recomputed_flops=again,
        forward_evaluations=1 + again / forward if forward else 1.0,
    )


def _choose(
    call: Call,
    argnums: int | Sequence[int] | None,
    budget: int,
    front: list[Point],
    considered: int,
    verify: bool,
) -> Plan:
    """The last point of the front that fits, as estimated or as compiled."""
    fitting = [i for i, point in enumerate(front) if point.peak_bytes <= budget]
    at = fitting[-1] if fitting else 0
    compiled: dict[int, int] = {}
    fits = bool(fitting)
    if verify:
        at, compiled = _walk_to_the_last_that_fits(call, argnums, budget, front, at)
        fits = compiled[at] <= budget
    return Plan(
        budget_bytes=budget,
        fits=fits,
        chosen=front[at],
        front=tuple(front),
        considered=considered,
        compiled_peak_bytes=compiled.get(at),
        reason=_reason(front, at, fits, considered, compiled),
    )


def _walk_to_the_last_that_fits(
    call: Call, argnums: int | Sequence[int] | None, budget: int, front: list[Point], at: int
) -> tuple[int, dict[int, int]]:
    compiled: dict[int, int] = {}

    def fits(i: int) -> bool:
        if i not in compiled:
            figures = compiled_bytes(
                compile_step(call.with_remat(front[i].policy), argnums, "plan")
            )
            compiled[i] = sum(figures[f"{part}_bytes"] for part in ("argument", "output", "temp"))
        return compiled[i] <= budget

    while not fits(at) and at > 0:
        at -= 1
    while fits(at) and at + 1 < len(front) and fits(at + 1):
        at += 1
    return at, compiled


def _reason(
    front: list[Point], at: int, fits: bool, considered: int, compiled: dict[int, int]
) -> str:
    point = front[at]
    figure = f"its peak is estimated at {show_bytes(point.peak_bytes)}"
    if at in compiled:
        figure += f", and compiled at {show_bytes(compiled[at])}"
    if not fits:
        return (
            f"Nothing fits. Of {considered} choices, {point.policy} needs the least: {figure}. "
            "Give more, or make the batch or the sequence smaller."
        )
    reason = (
        f"Of {considered} choices, {point.policy} repeats the least of the forward pass, "
        f"{point.forward_evaluations - 1:.2f} of it, among those that fit: {figure}."
    )
    if at + 1 < len(front):
        after = front[at + 1]
        reason += (
            f" The next, {after.policy}, repeats {after.forward_evaluations - 1:.2f} and needs "
            f"{show_bytes(compiled.get(at + 1, after.peak_bytes))}."
        )
    return reason


def _check_budget(arguments: Sequence[Argument], budget: int) -> None:
    needed = sum(argument.bytes for argument in arguments)
    if budget < needed:
        raise ValueError(
            f"budget_bytes={budget} ({show_bytes(budget)}) is below the arguments alone, weights "
            f"and inputs of {show_bytes(needed)}, which no policy makes smaller: give more, or "
            "shard them"
        )


def _row(point: Point) -> dict[str, Any]:
    return {**point._asdict(), "policy": repr(point.policy)}
