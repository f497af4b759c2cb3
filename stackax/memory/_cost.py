"""How many floating-point operations a traced step runs, and how many of them for the second time.

A product of matrices counts two for each multiply and add, a convolution likewise, anything else
one for each element that it computes or sums; moving data counts nothing.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from .. import _jax
from .._loop.scopes import REMATTED, read_mean_trips
from ._program import Program
from ._walk import inner_jaxprs, scan_of

# These move, make or name values, and compute none.
_MOVES = frozenset(
    """
    broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice dynamic_update_slice
    gather scatter concatenate pad rev split unstack select_n iota copy copy_p name device_put empty
    convert_element_type bitcast_convert_type reduce_precision optimization_barrier stop_gradient
    create_token sharding_constraint reshard pvary pcast random_wrap random_unwrap
    scheduled_loop_read scheduled_loop_write scheduled_loop_first_order
    """.split()
)


class Cost(NamedTuple):
    """Floating-point operations.

    Attributes:
        flops: All of them.
        recomputed_flops: Those of `flops` that the backward pass does again.
        has_unknown_loops: Whether a loop runs a number of trips that only its data decides, so
            that one trip was counted.
    """

    flops: float
    recomputed_flops: float
    has_unknown_loops: bool

    def __add__(self, other: "Cost") -> "Cost":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Cost(
            self.flops + other.flops,
            self.recomputed_flops + other.recomputed_flops,
            self.has_unknown_loops or other.has_unknown_loops,
        )

    def times(self, trips: float) -> "Cost":
        """The cost of so many trips."""
        return Cost(self.flops * trips, self.recomputed_flops * trips, self.has_unknown_loops)


def step_cost(program: Program) -> Cost:
    """What one step costs: the value and the gradients."""
    return _cost(program.jaxpr, is_again=False)


def forward_cost(program: Program) -> Cost:
    """What the value alone costs, with what the backward pass has the forward pass compute."""
    values = program.jaxpr.outvars[: program.outputs]
    return _cost(_jax.with_outputs(program.jaxpr, values), is_again=False)


def equation_flops(eqn: JaxprEqn) -> float:
    """The floating-point operations of one equation, those inside it included."""
    return _cost_of(eqn, is_again=False).flops


_NOTHING = Cost(0.0, 0.0, False)


def _cost(jaxpr: Jaxpr, is_again: bool) -> Cost:
    """The cost of what the outputs need: the compiler drops the rest, and so must the bill."""
    needed = {x for x in jaxpr.outvars if isinstance(x, Var)}
    cost = _NOTHING
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            cost += _cost_of(eqn, is_again)
            needed.update(x for x in eqn.invars if isinstance(x, Var))
    return cost


def _cost_of(eqn: JaxprEqn, is_again: bool) -> Cost:
    stack = _jax.name_stack(eqn)
    # Under `transpose` are derivatives of what was computed again, which are new.
    is_again = is_again or (REMATTED in stack and "transpose(" not in stack.split(REMATTED)[-1])
    if loop := scan_of(eqn):
        return _cost(loop.body, is_again).times(loop.length)
    inner = inner_jaxprs(eqn)
    if eqn.primitive.name == "while":
        trips = read_mean_trips(stack)
        once = sum((_cost(j, is_again) for j in inner), _NOTHING)
        return once._replace(has_unknown_loops=True) if trips is None else once.times(trips)
    if eqn.primitive.name == "cond":
        return max((_cost(j, is_again) for j in inner), key=lambda cost: cost.flops)
    if inner and not eqn.primitive.name.startswith("reduce") and not _is_kernel(eqn):
        # A function with a rule of its own carries the rule along: it runs one of the two.
        return _cost(inner[0], is_again)
    flops = _flops(eqn)
    return Cost(flops, flops if is_again else 0.0, False)


def _is_kernel(eqn: JaxprEqn) -> bool:
    return eqn.params.get("cost_estimate") is not None


def _flops(eqn: JaxprEqn) -> float:
    name = eqn.primitive.name
    if name in _MOVES:
        return 0.0
    if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
        return _dot_flops(eqn)
    if name == "conv_general_dilated":
        return _convolution_flops(eqn)
    if _is_kernel(eqn):
        return float(eqn.params["cost_estimate"].flops)
    elements = max(
        (_elements(x.aval) for x in (*eqn.outvars, *eqn.invars) if _is_floating(x.aval)),
        default=0,
    )
    if name == "sort":
        return elements * math.log2(max(2, elements))
    return float(elements)


def _dot_flops(eqn: JaxprEqn) -> float:
    left: Any = eqn.invars[0].aval
    numbers = eqn.params.get("dimension_numbers")
    if numbers is None:  # ragged: each row meets the matrix of its own group
        numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (contracted, _), _ = numbers
    return 2.0 * _elements(eqn.outvars[0].aval) * math.prod(left.shape[i] for i in contracted)


def _convolution_flops(eqn: JaxprEqn) -> float:
    numbers = eqn.params["dimension_numbers"]
    weights: Any = eqn.invars[1].aval
    kernel = weights.shape
    # The kernel's second dimension is already that of one group's inputs.
    per_output = math.prod(kernel[i] for i in numbers.rhs_spec[1:])
    return 2.0 * _elements(eqn.outvars[0].aval) * per_output


def _is_floating(aval) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def _elements(aval) -> int:
    return math.prod(getattr(aval, "shape", ()))
