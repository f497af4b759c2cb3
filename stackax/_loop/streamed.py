"""The scheduled loop with weights that are fetched one layer ahead of their use.

The slices that a step uses are in the loop's carry. While step i runs on them, those of the step
after it are fetched; the fetch depends on nothing that step i computes, so the two can overlap, and
what it brings is needed by the next trip, so it can't be dropped. The fetch is outside of what is
rematerialised: the backward pass fetches again, one step ahead in its own order, and no fetched
slice is ever kept for it. The last step stands behind its loop, and fetches nothing.

    forward    fetch 0 | fetch 1, run 0 | fetch 2, run 1 | ... | run N-1
    backward   fetch N-1 | fetch N-2, differentiate N-1 | ... | differentiate 0

So N fetches forward, and 2 N in a training step where every carry is kept; an advance of the
backward pass fetches once more what it runs. Two layers are live: the one that runs, and the next.

A trip runs two steps, though one would do: what a loop carries has one buffer, and while a step
still reads that, the next layer's slices can't be fetched into it. XLA would fetch them elsewhere,
and copy them whole at the end of each trip. Of two steps, the first fetches into a second buffer,
and the second into the first one, which is free by then; it is told to wait until it is
(`_held_back`). A trip is one step where XLA drops the order to wait (on the CPU, jax 0.10), and,
with a copy a layer, in the spans of a schedule with fewer slots than steps, whose length is data.

Temporary bytes in layers of weights, of a stack of 8 gathered from 8 devices: 1.6 forward in trips
of two steps; 2.0 in trips of one, and copies; 4.0 in trips of two that don't wait. In a training
step 3.0: one of them is a layer's gradients, before they are reduced to shards; 5.0 if the next
step does not wait until they have left.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._policy.lower import warn_if_remat_is_undone
from .._policy.policy import ScanCheckpointPolicy
from ..stream._stream import Route, Stream
from .rolled import Active, Loop, Streaming, fill, pick
from .schedule import Program
from .scopes import mean_trips, rematted
from .slicing import Arguments, is_key
from .slots import read_slot, write_slot
from .step import Arrays


def streaming_of(
    stream: Stream | None, policy: ScanCheckpointPolicy, arguments: Arguments
) -> Streaming | None:
    """How a loop gets its layers' slices; None where it reads them in place."""
    if stream is None:
        return None
    if not isinstance(stream, Stream):
        raise TypeError(
            "stream must be made by stackax.stream.from_shards or stackax.stream.from_host, not "
            f"{stream!r}."
        )
    # Keys are few bytes, and data movement treats them as something else than arrays.
    movable = [not is_key(x.array) for x in arguments.stacked]
    stacked = [x for x, is_movable in zip(arguments.stacked, movable, strict=True) if is_movable]
    places = [i for (i, _), m in zip(arguments.block, movable, strict=True) if m]
    routes: list[Route | None] = [None] * len(arguments.per_layer)
    return Streaming(tuple(fill(routes, places, stream.routes(stacked))), _refusal(policy))


def _refusal(policy: ScanCheckpointPolicy) -> str | None:
    """Why a streamed stack can't be differentiated under a policy."""
    if policy.has_names:
        return (
            "a streamed stack computes each layer again from its carry, so its policy can't keep "
            "internals by name: use remat=True, nested or slots with stream=, or drop stream=."
        )
    if not policy.recomputes:
        return (
            "a streamed stack can't be differentiated without remat: each layer's internals would "
            "be kept, and its weights with them. Give remat=True (or nested, slots, 'offload') "
            "with stream=, or drop stream=."
        )
    return None


def of_no_layers(arrays: Arrays) -> Arrays:
    """Arrays of no layers, on the device: nothing is fetched, but a step is traced with them."""
    on_host = [_jax.is_on_host(jax.typeof(x)) for x in arrays]
    pairs = zip(arrays, on_host, strict=True)
    return [jax.device_put(x, jax.memory.Space.Device) if far else x for x, far in pairs]


def run(loop: Loop, init: Arrays, per_layer: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
    """The last carry and the stacked outputs; nothing is kept."""

    def body(state, step):
        return _run_one(loop, step, state, per_layer, shared, waits=True), None

    # Goes round: the carry, the outputs, and the fetched slices of the next step.
    state = init, _zero_outputs(loop), fetch(loop, per_layer, 0)
    if loop.length > 1:
        steps = jnp.arange(loop.length - 1, dtype=jnp.int32)
        state, _ = jax.lax.scan(body, state, steps, unroll=_trip(loop))
    return _run_last(loop, state, per_layer, shared)


def run_and_keep(
    loop: Loop, init: Arrays, per_layer: Arrays, shared: Arrays
) -> tuple[Arrays, Arrays, Arrays]:
    """The same, and the carries that the schedule wants."""
    if not _barriers_needed_are_kept(loop):
        warn_if_remat_is_undone()
    state = init, _zero_outputs(loop), fetch(loop, per_layer, 0)
    keep = _keep_all if _keeps_all(loop.program) else _keep_some
    state, kept = keep(loop, state, per_layer, shared)
    return *_run_last(loop, state, per_layer, shared), kept


def _keep_all(
    loop: Loop, state: tuple[Arrays, Arrays, Arrays], per_layer: Arrays, shared: Arrays
) -> tuple[Any, Arrays]:
    """Runs all steps but the last, and keeps the carry into every step."""

    def body(state, step):
        state, kept = state
        kept = loop.store(kept, state[0], step)
        return (_run_one(loop, step, state, per_layer, shared, waits=True), kept), None

    avals = [var.aval for var in loop.jaxpr.outvars[: loop.sizes.carry]]
    kept = loop.put_away([_jax.stacked_zeros(loop.length, aval) for aval in avals])
    if loop.length > 1:
        steps = jnp.arange(loop.length - 1, dtype=jnp.int32)
        (state, kept), _ = jax.lax.scan(body, (state, kept), steps, unroll=_trip(loop))
    return state, loop.store(kept, state[0], loop.length - 1)


def _keep_some(
    loop: Loop, state: tuple[Arrays, Arrays, Arrays], per_layer: Arrays, shared: Arrays
) -> tuple[Any, Arrays]:
    """Runs all steps but the last, and keeps the carry into each segment of the schedule."""

    def segment(state, bounds):
        kept = loop.put_away(state[0])
        with mean_trips(loop.length - 1, len(loop.program.forward)):
            return _run_span(loop, bounds[0], bounds[1], state, per_layer, shared), kept

    return jax.lax.scan(segment, state, np.minimum(loop.program.forward, loop.length - 1))


def backward(
    loop: Loop, active: Active, x: Any, ct_carry: Arrays, ct_stacked: Arrays
) -> tuple[Arrays, Arrays, Arrays]:
    """Cotangents of the first carry, of the active slices and of the active shared arrays.

    Args:
        loop: The loop.
        active: What is differentiated.
        x: The operands: what the loop ran on, and what it kept.
        ct_carry: Cotangents of the last carry's inexact arrays.
        ct_stacked: Cotangents of the outputs' inexact arrays, layers first.
    """
    program = loop.program
    advances = jnp.asarray(program.advances)
    inside = active._replace(carry=loop.inexact_carry)

    def advance(row, state):
        carry, kept, ahead = state
        slot, start, stop = advances[row]
        if program.slots > 1:  # a single slot keeps the first carry from beginning to end
            kept = loop.store(kept, carry, slot)
        with mean_trips(program.advanced_steps, program.advanced_rows):
            state = _run_span(loop, start, stop, (carry, [], ahead), x.per_layer, x.shared)
        return state[0], kept, state[2]

    def differentiate(state, row, *, is_last=False):
        # Goes round: the cotangent of the carry, the kept carries, the sums of the shared arrays'
        # cotangents, the gradients of all layers, and the fetched slices of the next step to run.
        ct_carry, kept, ct_shared, gradients, ahead = state
        # What this step reads, it reads when the step before it is done; nor can XLA find that the
        # forward pass has read it already, where no loop is left that keeps the two apart.
        ct_carry, (slot, step, first, last, then) = _held_back(ct_carry, row)
        state = loop.restore(kept, slot), kept, ahead
        if program.advanced_rows:
            with rematted(), mean_trips(program.advanced_rows, loop.length):
                state = jax.lax.fori_loop(first, last, advance, state)
        carry, kept, ahead = state
        following = [] if is_last else fetch(loop, x.per_layer, then)
        ct_outputs = loop.read(ct_stacked, step)
        slices = _with_rest(loop, ahead, x.per_layer, step)
        f, primals = loop.differentiable_step(inside, carry, slices, x.shared)
        with rematted():
            _, pullback, _ = jax.vjp(f, *primals, has_aux=True)
        ct_carry, ct_slices, more = pullback((ct_carry, ct_outputs))
        ct_shared = [a + b for a, b in zip(ct_shared, more, strict=True)]
        # A layer's gradients leave before the next layer's are made: they are whole till then.
        ct_carry, ct_slices = _held_back(ct_carry, _send(loop, active, ct_slices))
        gradients = _write_gradients(loop, gradients, ct_slices, step)
        return ct_carry, kept, ct_shared, gradients, following

    rows = _rows(program)
    zeros = [jnp.zeros_like(s) for s in pick(x.shared, active.shared)]
    ahead = fetch(loop, x.per_layer, _held_back(ct_carry, jnp.asarray(rows[-1, 5]))[1])
    state = ct_carry, x.kept, zeros, _room_for_gradients(loop, active, x.per_layer), ahead
    if loop.length > 1:
        state, _ = jax.lax.scan(
            lambda state, row: (differentiate(state, tuple(row)), None),
            state,
            rows[1:, :5],
            reverse=True,
            unroll=_backward_trip(loop),
        )
    row = tuple(jnp.asarray(entry) for entry in rows[0, :5])
    ct_carry, _, ct_shared, gradients, _ = differentiate(state, row, is_last=True)
    by_index = dict(zip(loop.inexact_carry, ct_carry, strict=True))
    return [by_index[i] for i in active.carry], gradients, ct_shared


def fetch(loop: Loop, per_layer: Arrays, step: Any) -> Arrays:
    """The slices that the layer at `step` does not read in place, fetched."""
    streaming, layer = _streaming(loop), loop.layer(step)
    slices = [read_slot(x, layer) for x in pick(per_layer, streaming.fetched)]
    routes = (route for route in streaming.routes if route is not None)
    return [route.fetch(x) for route, x in zip(routes, slices, strict=True)]


def _with_rest(loop: Loop, ahead: Arrays, per_layer: Arrays, step: Any) -> Arrays:
    """All slices of the layer at `step`: those fetched ahead, and those read in place."""
    fetched = _streaming(loop).fetched
    rest = [i for i in range(len(per_layer)) if i not in fetched]
    slices = fill([None] * len(per_layer), rest, loop.read(pick(per_layer, rest), step))
    return fill(slices, fetched, ahead)


def _run_one(
    loop: Loop,
    step: Any,
    state: tuple[Arrays, Arrays, Arrays],
    per_layer: Arrays,
    shared: Arrays,
    *,
    waits: bool,
) -> tuple[Arrays, Arrays, Arrays]:
    """One step, while the slices of the next are fetched."""
    carry, outputs, ahead = state
    following = step + 1
    if waits and _trip(loop) > 1:
        carry, following = _held_back(carry, following)
    next_ahead = fetch(loop, per_layer, following)
    carry, new = loop.step(carry, _with_rest(loop, ahead, per_layer, step), shared)
    return carry, _write(loop, outputs, new, step), next_ahead


def _run_last(
    loop: Loop, state: tuple[Arrays, Arrays, Arrays], per_layer: Arrays, shared: Arrays
) -> tuple[Arrays, Arrays]:
    """The last step, after which nothing is to be fetched."""
    carry, outputs, ahead = state
    step = loop.length - 1
    carry, new = loop.step(carry, _with_rest(loop, ahead, per_layer, step), shared)
    return carry, _write(loop, outputs, new, step)


def _run_span(
    loop: Loop,
    start: Any,
    stop: Any,
    state: tuple[Arrays, Arrays, Arrays],
    per_layer: Arrays,
    shared: Arrays,
) -> tuple[Arrays, Arrays, Arrays]:
    """Steps `start` to `stop - 1`, which may be data."""

    def one(step, state):
        return _run_one(loop, step, state, per_layer, shared, waits=False)

    return jax.lax.fori_loop(start, stop, one, state)


def _held_back(arrays: Arrays, indices: Any) -> tuple[Arrays, Any]:
    """Both, of which the indices are not known before the arrays are."""
    return jax.lax.optimization_barrier((arrays, indices))


def _trip(loop: Loop) -> int:
    """How many steps a trip runs: an even number, so that two buffers take turns."""
    if not _jax.barrier_survives_compilation():
        return loop.unroll
    return loop.unroll + loop.unroll % 2


def _backward_trip(loop: Loop) -> int:
    """One step where the advances are loops of their own, or where XLA would drop the loop.

    XLA drops loops of one trip. The forward pass can afford that, whose steps hand on little.
    """
    trip = _trip(loop)
    return trip if _keeps_all(loop.program) and loop.length > 2 * trip else 1


def _barriers_needed_are_kept(loop: Loop) -> bool:
    """Whether nothing merges the recomputation with the forward pass."""
    return loop.length > 2 * _trip(loop) or _jax.barrier_survives_compilation()


def _keeps_all(program: Program) -> bool:
    return program.slots == len(program.restore)


def _rows(program: Program) -> np.ndarray:
    """For each step what the backward pass needs to know to differentiate it, as int32.

    The slot to restore, the step itself, the first and the last of its advances, the step of which
    the slices are to be fetched meanwhile, and the step that it runs first.
    """
    steps = np.arange(len(program.restore), dtype=np.int32)
    runs_first = np.where(program.first < program.last, program.restore[:, 1], steps)
    then = np.concatenate([[0], runs_first[:-1]])
    columns = (program.restore[:, 0], steps, program.first, program.last, then, runs_first)
    return np.stack(columns, axis=1).astype(np.int32)


def _zero_outputs(loop: Loop) -> Arrays:
    return [_jax.stacked_zeros(loop.length, aval) for aval in loop.output_avals]


def _write(loop: Loop, outputs: Arrays, new: Arrays, step: Any) -> Arrays:
    layer = loop.layer(step)
    pairs = zip(outputs, new, strict=False)  # an advance writes no outputs
    return [jax.lax.dynamic_update_index_in_dim(o, n, layer, 0) for o, n in pairs]


def _room_for_gradients(loop: Loop, active: Active, per_layer: Arrays) -> Arrays:
    """Arrays for all layers' gradients, each of which is overwritten by its layer."""
    routes = pick(_streaming(loop).routes, active.per_layer)
    pairs = zip(pick(per_layer, active.per_layer), routes, strict=True)
    return [jnp.zeros_like(x) if route is None else route.room(x) for x, route in pairs]


def _send(loop: Loop, active: Active, new: Arrays) -> Arrays:
    routes: Sequence[Route | None] = pick(_streaming(loop).routes, active.per_layer)
    return [g if r is None else r.send(g) for g, r in zip(new, routes, strict=True)]


def _write_gradients(loop: Loop, gradients: Arrays, sent: Arrays, step: Any) -> Arrays:
    layer = loop.layer(step)
    return [write_slot(all_, g, layer) for all_, g in zip(gradients, sent, strict=True)]


def _streaming(loop: Loop) -> Streaming:
    assert loop.streaming is not None
    return loop.streaming
