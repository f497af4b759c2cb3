"""A step as a jaxpr, the schedule that it follows, and the rolled loop that runs it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from .. import _jax
from ..stream._stream import Route
from .schedule import Program
from .slots import read_slot, write_slot
from .step import Arrays


class Sizes(NamedTuple):
    """How many arrays a carry, a layer's slices and the shared arrays have."""

    carry: int
    per_layer: int
    shared: int


class Active(NamedTuple):
    """Which arrays are differentiated, as indices into the three lists."""

    carry: tuple[int, ...]
    per_layer: tuple[int, ...]
    shared: tuple[int, ...]


class Streaming(NamedTuple):
    """How a loop gets the slices of its layers where they are fetched.

    Attributes:
        routes: For each per-layer array the way that its slices come, or None where they are read
            in place.
        refusal: Why the loop can't be differentiated under its policy, if it can't.
    """

    routes: tuple[Route | None, ...]
    refusal: str | None

    @property
    def fetched(self) -> list[int]:
        """Which of the per-layer arrays are fetched."""
        return [i for i, route in enumerate(self.routes) if route is not None]


class Loop:
    """What is static about a loop: the step as a jaxpr, and the schedule. Equal to itself alone."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        sizes: Sizes,
        program: Program,
        reverse: bool,
        unroll: int,
        offload: bool,
        streaming: Streaming | None = None,
    ):
        self.jaxpr = jaxpr
        self.sizes = sizes
        self.program = program
        self.reverse = reverse
        self.unroll = unroll
        self.offload = offload
        self.streaming = streaming
        self.length = len(program.restore)
        self.output_avals = [var.aval for var in jaxpr.outvars[sizes.carry :]]
        # Where an integer goes round the loop there is nothing to differentiate.
        self.inexact_carry = _inexact([var.aval for var in jaxpr.outvars[: sizes.carry]])
        self.inexact_outputs = _inexact(self.output_avals)

    def with_jaxpr(self, jaxpr: Jaxpr) -> "Loop":
        """The same loop around another step."""
        return Loop(
            jaxpr,
            self.sizes,
            self.program,
            self.reverse,
            self.unroll,
            self.offload,
            self.streaming,
        )

    def step(self, carry: Arrays, slices: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
        """One layer."""
        closed_over = len(self.jaxpr.constvars)
        args = (*carry, *slices, *shared[closed_over:])
        out = _jax.eval_jaxpr(self.jaxpr, shared[:closed_over], args)
        return out[: self.sizes.carry], out[self.sizes.carry :]

    def layer(self, step: Any) -> Any:
        """Which layer runs at `step`."""
        return self.length - 1 - step if self.reverse else step

    def read(self, per_layer: Arrays, step: Any) -> Arrays:
        """The slices of the layer that runs at `step`."""
        layer = self.layer(step)
        return [_read(x, layer) for x in per_layer]

    def by_layer(self, table: np.ndarray) -> np.ndarray:
        """A table of steps, in the order of the layers."""
        return table[::-1] if self.reverse else table

    def advance(
        self, start: Any, stop: Any, state: tuple[Arrays, Arrays], per_layer: Arrays, shared: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Runs steps `start` to `stop - 1` on `(carry, outputs)`, and writes outputs if any."""

        def one(step, state):
            carry, outputs = state
            carry, new = self.step(carry, self.read(per_layer, step), shared)
            layer = self.layer(step)
            return carry, [_write(o, n, layer) for o, n in zip(outputs, new, strict=False)]

        return jax.lax.fori_loop(start, stop, one, state)

    def put_away(self, carry: Arrays) -> Arrays:
        """A carry, moved to where kept carries live."""
        if not self.offload:
            return carry
        return [jax.device_put(x, jax.memory.Space.Host) for x in carry]

    def restore(self, kept: Arrays, slot: Any) -> Arrays:
        """The carry in `slot`, back on the device."""
        return self.on_device([read_slot(x, slot) for x in kept])

    def store(self, kept: Arrays, carry: Arrays, slot: Any) -> Arrays:
        """`kept`, with `carry` in `slot`."""
        pairs = zip(kept, self.put_away(carry), strict=True)
        return [write_slot(x, value, slot) for x, value in pairs]

    def on_device(self, arrays: Arrays) -> Arrays:
        """Kept arrays, moved to the device."""
        if not self.offload:
            return arrays
        return [jax.device_put(x, jax.memory.Space.Device) for x in arrays]

    def differentiable_step(
        self, active: Active, carry: Arrays, slices: Arrays, shared: Arrays
    ) -> tuple[Callable, tuple[Arrays, Arrays, Arrays]]:
        """The step as a function of its active arrays, and those arrays.

        The function returns the carry's and the outputs' inexact arrays, and as auxiliary value
        the whole carry.
        """

        def f(some_carry, some_slices, some_shared):
            new_carry, outputs = self.step(
                fill(carry, active.carry, some_carry),
                fill(slices, active.per_layer, some_slices),
                fill(shared, active.shared, some_shared),
            )
            inexact = pick(new_carry, self.inexact_carry), pick(outputs, self.inexact_outputs)
            return inexact, new_carry

        return f, (
            pick(carry, active.carry),
            pick(slices, active.per_layer),
            pick(shared, active.shared),
        )


def pick(items: Sequence, indices: Sequence[int]) -> list:
    """The items at `indices`."""
    return [items[i] for i in indices]


def fill(items: Sequence, indices: Sequence[int], some: Sequence) -> list:
    """`items`, with `some` in the places `indices`."""
    filled = list(items)
    for i, item in zip(indices, some, strict=True):
        filled[i] = item
    return filled


def slices_of(arrays: Arrays, streaming: Streaming | None = None) -> list[jax.ShapeDtypeStruct]:
    """The types of the slices of `arrays` along their first axis, as a layer gets them."""
    return jax.eval_shape(lambda xs: fetched([_read(x, 0) for x in xs], streaming), list(arrays))


def fetched(slices: Arrays, streaming: Streaming | None) -> Arrays:
    """A layer's slices, those that have a route fetched."""
    if streaming is None:
        return slices
    pairs = zip(slices, streaming.routes, strict=True)
    return [x if route is None else route.fetch(x) for x, route in pairs]


def _inexact(avals: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact))


def _read(stack: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)


def _write(stack: Any, value: Any, index: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(stack, value, index, 0)
