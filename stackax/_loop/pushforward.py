"""The tangents of a scheduled loop as one primitive, linear in the tangents that it is given.

Evaluated it is forward mode; transposed it is the backward pass that follows the schedule.
"""

import functools as ft
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _jax
from . import streamed
from .first_order import first_order
from .rolled import Active, Loop, Streaming, fetched, fill, pick, slices_of
from .scopes import mean_trips, rematted
from .step import Arrays


class Operands(NamedTuple):
    """The primitive's operands: what the loop ran on, what it kept, and the tangents."""

    per_layer: list
    shared: list
    kept: list
    t_carry: list
    t_per_layer: list
    t_shared: list

    @staticmethod
    def of(loop: Loop, active: Active, flat: Sequence) -> "Operands":
        """Sorts operands, or anything that there is one of for each."""
        sizes = (loop.sizes.per_layer, loop.sizes.shared, loop.sizes.carry, *map(len, active))
        ends = np.cumsum(sizes).tolist()
        assert ends[-1] == len(flat)
        return Operands(*(list(flat[end - n : end]) for n, end in zip(sizes, ends, strict=True)))

    def flat(self) -> list:
        """The operands in a row."""
        return [x for part in self for x in part]

    @property
    def given(self) -> list:
        """The tangents."""
        return self.t_carry + self.t_per_layer + self.t_shared


def pushforward(values: Operands, loop: Loop, active: Active) -> Arrays:
    """Tangents of the last carry's and the outputs' inexact arrays."""
    return pushforward_p.bind(*values.flat(), loop=loop, active=active)


def _pushforward(*operands: Any, loop: Loop, active: Active) -> Arrays:
    """Forward mode: a scan of the step's own jvp, from the first carry, which is kept in slot 0."""
    x = Operands.of(loop, active, operands)
    carry = loop.restore(x.kept, 0)
    inside = active._replace(carry=loop.inexact_carry)
    t_carry = fill([jnp.zeros_like(c) for c in carry], active.carry, x.t_carry)
    t_streaming = _of_active(loop.streaming, active)

    def body(state, xs):
        carry, t_carry = state
        slices, t_slices = fetched(xs[0], loop.streaming), fetched(xs[1], t_streaming)
        f, primals = loop.differentiable_step(inside, carry, slices, x.shared)
        tangents = (t_carry, t_slices, x.t_shared)
        _, (t_carry, t_outputs), carry = jax.jvp(f, primals, tangents, has_aux=True)
        return (carry, t_carry), t_outputs

    (_, t_carry), t_outputs = jax.lax.scan(
        body,
        (carry, pick(t_carry, loop.inexact_carry)),
        (x.per_layer, x.t_per_layer),
        length=loop.length,
        reverse=loop.reverse,
    )
    return [*t_carry, *t_outputs]


def _backward(
    loop: Loop, active: Active, x: Operands, ct_carry: Arrays, ct_stacked: Arrays
) -> tuple[Arrays, Arrays, Arrays]:
    """Cotangents of the first carry, of the active slices and of the active shared arrays.

    Args:
        loop: The loop.
        active: What is differentiated.
        x: What the loop ran on, and what it kept.
        ct_carry: Cotangents of the last carry's inexact arrays.
        ct_stacked: Cotangents of the outputs' inexact arrays, layers first.
    """
    if loop.streaming is not None:
        return streamed.backward(loop, active, x, ct_carry, ct_stacked)
    program = loop.program
    advances = jnp.asarray(program.advances)
    inside = active._replace(carry=loop.inexact_carry)

    def advance(row, state):
        carry, kept, _ = state
        slot, start, stop = advances[row]
        if program.slots > 1:  # a single slot keeps the first carry from beginning to end
            kept = loop.store(kept, carry, slot)
        with mean_trips(program.advanced_steps, program.advanced_rows):
            carry, _ = loop.advance(start, stop, (carry, []), x.per_layer, x.shared)
        return carry, kept, stop

    def differentiate(state, tables):
        # Goes round: the cotangent of the carry, the kept carries, and the sums of the shared
        # arrays' cotangents. Comes out: the cotangents of this layer's slices.
        ct_carry, kept, ct_shared = state
        if loop.unroll > 1:
            # Unrolled, steps stand side by side. XLA must not merge an advance with the step that
            # it ran ahead of, nor start on a step before the one after it is done.
            ct_carry, kept = jax.lax.optimization_barrier((ct_carry, kept))
        (slot, step), first, last = tables
        state = loop.restore(kept, slot), kept, step
        # The step is where the advances have led, and not another table's entry, so that its
        # slices cannot be read before them and be alive all the while.
        with rematted(), mean_trips(program.advanced_rows, loop.length):
            carry, kept, step = jax.lax.fori_loop(first, last, advance, state)
        slices, ct_outputs = (loop.read(part, step) for part in (x.per_layer, ct_stacked))
        f, primals = loop.differentiable_step(inside, carry, slices, x.shared)
        with rematted():
            _, pullback, _ = jax.vjp(f, *primals, has_aux=True)
        ct_carry, ct_slices, more = pullback((ct_carry, ct_outputs))
        ct_shared = [a + b for a, b in zip(ct_shared, more, strict=True)]
        return (ct_carry, kept, ct_shared), ct_slices

    (ct_carry, _, ct_shared), ct_per_layer = jax.lax.scan(
        differentiate,
        (ct_carry, x.kept, [jnp.zeros_like(s) for s in pick(x.shared, active.shared)]),
        tuple(map(loop.by_layer, (program.restore, program.first, program.last))),
        length=loop.length,
        reverse=not loop.reverse,
        unroll=loop.unroll,
    )
    by_index = dict(zip(loop.inexact_carry, ct_carry, strict=True))
    return [by_index[i] for i in active.carry], ct_per_layer, ct_shared


pushforward_p = Primitive("scheduled_loop_pushforward")
pushforward_p.multiple_results = True
pushforward_p.def_impl(_pushforward)
mlir.register_lowering(pushforward_p, mlir.lower_fun(_pushforward, multiple_results=True))


@pushforward_p.def_abstract_eval
def _abstract(*operands: Any, loop: Loop, active: Active):
    carry = [var.aval for var in loop.jaxpr.outvars[: loop.sizes.carry]]
    outputs = [_jax.stacked_aval(loop.length, aval) for aval in loop.output_avals]
    return pick(carry, loop.inexact_carry) + pick(outputs, loop.inexact_outputs)


def _transpose(cotangents: Sequence[Any], *operands: Any, loop: Loop, active: Active):
    x = Operands.of(loop, active, operands)
    cts = [ad.instantiate_zeros(ct) for ct in cotangents]
    carries = len(loop.inexact_carry)
    cts = _backward(loop, active, x, cts[:carries], cts[carries:])
    pairs = zip(first_order([ct for part in cts for ct in part]), x.given, strict=True)
    # An operand that is known, and not a tangent to be found, gets no cotangent.
    found = [ct if ad.is_undefined_primal(t) else None for ct, t in pairs]
    return [None] * (len(operands) - len(found)) + found


ad.primitive_transposes[pushforward_p] = _transpose


def _jvp_of_pushforward(primals: Sequence, tangents: Sequence, *, loop: Loop, active: Active):
    f = ft.partial(_pushforward, loop=loop, active=active)
    count = len(primals) - sum(map(len, active))
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    if all(i >= count for i in moving):  # linear in what moves
        given = [ad.instantiate_zeros(t) for t in tangents[count:]]
        bind = ft.partial(pushforward_p.bind, loop=loop, active=active)
        return bind(*primals), bind(*primals[:count], *given)

    def of_moving(*some):
        return f(*fill(primals, moving, some))

    return jax.jvp(of_moving, tuple(pick(primals, moving)), tuple(pick(tangents, moving)))


ad.primitive_jvps[pushforward_p] = _jvp_of_pushforward


def _batch(axis_data: Any, operands: Sequence, dims: Sequence, *, loop: Loop, active: Active):
    if all(dim is None for dim in dims):
        out = pushforward_p.bind(*operands, loop=loop, active=active)
        return out, [None] * len(out)
    x, d = (Operands.of(loop, active, each) for each in (operands, dims))
    if all(dim is None for dim in d.per_layer + d.shared + d.kept):
        # Only the tangents are batched, as in jacfwd: map the scan over them alone.
        f = ft.partial(_pushforward, loop=loop, active=active)
        names = {"axis_name": axis_data.name, "spmd_axis_name": axis_data.spmd_name}
        out = jax.vmap(f, in_axes=tuple(dims), axis_size=axis_data.size, **names)(*operands)
        return out, [0] * len(out)
    if loop.streaming is not None:
        _check_unbatched(loop.streaming, d, active)
    # Otherwise the step is made to work on a batch. Slices and shared arrays are batched where
    # they or their tangents are; the carry always.
    batched = Active(
        carry=tuple(range(loop.sizes.carry)),
        per_layer=_either(d.per_layer, active.per_layer, d.t_per_layer),
        shared=_either(d.shared, active.shared, d.t_shared),
    )
    move = ft.partial(_move_batch, axis_data.size)
    x = Operands(
        per_layer=move(x.per_layer, d.per_layer, batched.per_layer, 1),
        shared=move(x.shared, d.shared, batched.shared, 0),
        kept=move(x.kept, d.kept, batched.carry, 1),
        t_carry=move(x.t_carry, d.t_carry, range(len(x.t_carry)), 0),
        t_per_layer=move(
            x.t_per_layer, d.t_per_layer, _places(active.per_layer, batched.per_layer), 1
        ),
        t_shared=move(x.t_shared, d.t_shared, _places(active.shared, batched.shared), 0),
    )
    out = pushforward(x, _batched_loop(loop, axis_data, batched, x), active)
    carries = len(loop.inexact_carry)
    return out, [0] * carries + [1] * (len(out) - carries)


def _of_active(streaming: Streaming | None, active: Active) -> Streaming | None:
    """How the tangents of the active per-layer arrays come: as the arrays do."""
    if streaming is None:
        return None
    return streaming._replace(routes=tuple(pick(streaming.routes, active.per_layer)))


def _check_unbatched(streaming: Streaming, d: Operands, active: Active) -> None:
    if set(streaming.fetched) & set(_either(d.per_layer, active.per_layer, d.t_per_layer)):
        raise ValueError(
            "a streamed stack can't be mapped over its weights: jax.vmap over the stack itself "
            "would fetch the layers of all its copies. Map over the carry, or drop stream=."
        )


def _either(dims: Sequence, active: Sequence[int], t_dims: Sequence) -> tuple[int, ...]:
    """Which arrays are batched, or have tangents that are."""
    batched = {i for i, dim in enumerate(dims) if dim is not None}
    batched |= {i for i, dim in zip(active, t_dims, strict=True) if dim is not None}
    return tuple(sorted(batched))


def _places(active: Sequence[int], batched: Sequence[int]) -> list[int]:
    """The places, among the active arrays, of those that are batched."""
    return [place for place, i in enumerate(active) if i in batched]


def _move_batch(size: int, arrays: list, dims: list, batched: Sequence[int], to: int) -> list:
    """Puts the batch axis of the arrays at `batched` to `to`, and makes it where there is none."""

    def moved(array, dim):
        if dim is not None:
            return jnp.moveaxis(array, dim, to)
        shape = (*array.shape[:to], size, *array.shape[to:])
        return jnp.broadcast_to(jnp.expand_dims(array, to), shape)

    return fill(arrays, batched, [moved(arrays[i], dims[i]) for i in batched])


def _batched_loop(loop: Loop, axis_data: Any, batched: Active, x: Operands) -> Loop:
    def axes(count, some):
        return fill([None] * count, some, [0] * len(some))

    step = jax.vmap(
        loop.step,
        in_axes=tuple(map(axes, loop.sizes, batched)),
        axis_size=axis_data.size,
        axis_name=axis_data.name,
        spmd_axis_name=axis_data.spmd_name,
    )
    carry = jax.eval_shape(lambda kept: loop.restore(kept, 0), x.kept)
    closed = jax.make_jaxpr(step)(carry, slices_of(x.per_layer, loop.streaming), x.shared)
    assert not closed.consts  # whatever the step reads is among its arguments
    return loop.with_jaxpr(closed.jaxpr)


batching.fancy_primitive_batchers[pushforward_p] = _batch
