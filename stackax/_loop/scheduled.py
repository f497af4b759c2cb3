"""The loop that owns its backward pass, and follows a schedule.

The forward pass keeps the carries that the schedule wants. The backward pass is one rolled loop: it
restores a kept carry, advances from it (keeping carries on the way), and differentiates one step.
It reads one layer's slices at a time and writes each layer's gradient once, so neither the weights
nor their gradients are ever held twice, and the size of the code depends on neither the number of
layers nor that of slots.

How it fits into JAX: the loop is a `custom_jvp` whose tangents come from one primitive, linear in
the tangents that it is given.

    run               no derivative wanted: a plain scan
    run_and_keep      the same values, and the kept carries
    pushforward_p     (slices, shared, kept carries, tangents) -> tangents
        evaluated       forward mode: a scan of the step's own jvp
        transposed      reverse mode: the backward pass above
        differentiated  forward over forward

So jvp, linearize, vmap and forward over reverse work, and arrays that are not differentiated cost
nothing. Reverse mode over any of it is refused by `first_order`.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr

from .. import _jax
from .._policy.lower import warn_if_host_is_device, warn_if_remat_is_undone
from . import streamed
from .first_order import first_order
from .pushforward import Operands, pushforward
from .rolled import Active, Loop, Sizes, Streaming, fill, pick, slices_of
from .schedule import Span, compile_tree
from .scopes import mean_trips
from .slicing import is_key
from .step import Arrays, Step


def run_scheduled(
    step: Step,
    per_layer: Arrays,
    shared: Arrays,
    *,
    tree: Span,
    reverse: bool,
    unroll: int,
    offload: bool,
    streaming: Streaming | None = None,
) -> tuple[Arrays, Arrays]:
    """The last carry and the stacked outputs, as arrays.

    Args:
        step: The function of one layer.
        per_layer: Arrays with the layers first.
        shared: Arrays that every layer gets whole.
        tree: The schedule, over as many steps as there are layers.
        reverse: Whether to run from the last layer to the first.
        unroll: How many layers one trip of the backward pass differentiates.
        offload: Whether the kept carries live in the host's memory.
        streaming: How the slices come, where they are fetched ahead of their use.
    """
    if offload:
        warn_if_host_is_device()
    if unroll > 1:
        warn_if_remat_is_undone()
    body, init, rekey = _without_keys(step)
    jaxpr, consts, init = _trace(body, init, slices_of(per_layer, streaming), shared)
    # What the step closes over is an argument like any other: it may be differentiated.
    closed_over = [jnp.asarray(const) for const in consts]
    loop = Loop(
        jaxpr=jaxpr,
        sizes=Sizes(len(init), len(per_layer), len(shared) + len(closed_over)),
        program=compile_tree(tree),
        reverse=reverse,
        unroll=unroll,
        offload=offload,
        streaming=streaming,
    )
    return rekey(*_differentiable(loop)(init, per_layer, closed_over + list(shared)))


def _without_keys(step: Step) -> tuple[Callable, Arrays, Callable]:
    """The step and its first carry with typed keys as plain data, and a function that undoes it.

    What goes round a loop or comes out of it is put into buffers, which hold numbers.
    """
    carry_keys = [_key_impl(x) for x in step.init]
    output_keys: list[Any] = []

    def body(carry, per_layer, shared):
        carry, outputs = step(_as_keys(carry, carry_keys), per_layer, shared)
        output_keys[:] = [_key_impl(x) for x in outputs]
        return _as_data(carry), _as_data(outputs)

    def rekey(carry, outputs):
        return _as_keys(carry, carry_keys), _as_keys(outputs, output_keys)

    return body, _as_data(step.init), rekey


def _trace(
    body: Callable, init: Arrays, slices: Sequence[Any], shared: Arrays
) -> tuple[Jaxpr, Sequence[Any], Arrays]:
    """The step as a jaxpr, what it closes over, and the first carry with the type of the next."""
    closed = jax.make_jaxpr(body)(init, slices, shared)
    avals: list[Any] = [var.aval for var in closed.jaxpr.outvars[: len(init)]]
    dtypes = [aval.dtype for aval in avals]
    if any(x.dtype != dtype for x, dtype in zip(init, dtypes, strict=True)):
        # A weakly typed number went in, such as a literal 0.0.
        init = [x.astype(dtype) for x, dtype in zip(init, dtypes, strict=True)]
        closed = jax.make_jaxpr(body)(init, slices, shared)
    return closed.jaxpr, closed.consts, init


def _differentiable(loop: Loop) -> Callable[..., tuple[Arrays, Arrays]]:
    run = jax.custom_jvp(ft.partial(_run, loop))

    def jvp(primals, tangents):
        if loop.streaming is not None and loop.streaming.refusal is not None:
            raise ValueError(loop.streaming.refusal)
        active = Active(*(_moving(part) for part in tangents))
        given = [pick(part, some) for part, some in zip(tangents, active, strict=True)]
        _, per_layer, shared = primals
        carry, outputs, kept = map(first_order, _run_and_keep(loop, *primals))
        flat = pushforward(Operands(per_layer, shared, kept, *given), loop, active)
        count = len(loop.inexact_carry)
        t_carry = _with_float0(carry, loop.inexact_carry, flat[:count])
        t_outputs = _with_float0(outputs, loop.inexact_outputs, flat[count:])
        return (carry, outputs), (t_carry, t_outputs)

    run.defjvp(jvp, symbolic_zeros=True)
    return run


def _moving(tangents: Sequence) -> tuple[int, ...]:
    """The places of the tangents that are not known to be zero."""
    still = [isinstance(t, SymbolicZero) or t.dtype == jax.dtypes.float0 for t in tangents]
    return tuple(i for i, is_still in enumerate(still) if not is_still)


def _with_float0(values: Arrays, inexact: Sequence[int], tangents: Arrays) -> Arrays:
    """Tangents for all of `values`: those of integers have a type, but no value."""
    still = [np.zeros(x.shape, jax.dtypes.float0) for x in values]
    return fill(still, inexact, tangents)


def _run(loop: Loop, init: Arrays, per_layer: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
    if loop.streaming is not None:
        return streamed.run(loop, init, per_layer, shared)

    def body(carry, slices):
        return loop.step(carry, slices, shared)

    return jax.lax.scan(body, init, per_layer, length=loop.length, reverse=loop.reverse)


def _run_and_keep(
    loop: Loop, init: Arrays, per_layer: Arrays, shared: Arrays
) -> tuple[Arrays, Arrays, Arrays]:
    if loop.streaming is not None:
        return streamed.run_and_keep(loop, init, per_layer, shared)
    outputs = [_jax.stacked_zeros(loop.length, aval) for aval in loop.output_avals]

    def segment(state, bounds):
        carry, _ = state
        with mean_trips(loop.length, len(loop.program.forward)):
            state = loop.advance(bounds[0], bounds[1], state, per_layer, shared)
        return state, loop.put_away(carry)

    (carry, outputs), kept = jax.lax.scan(segment, (init, outputs), loop.program.forward)
    return carry, outputs, kept


def _key_impl(x: Any) -> Any:
    return jr.key_impl(x) if is_key(x) else None


def _as_data(arrays: Arrays) -> Arrays:
    return [jr.key_data(x) if is_key(x) else x for x in arrays]


def _as_keys(arrays: Arrays, impls: Sequence[Any]) -> Arrays:
    pairs = zip(arrays, impls, strict=True)
    return [x if impl is None else jr.wrap_key_data(x, impl=impl) for x, impl in pairs]
