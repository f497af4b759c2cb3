"""Weights that lie in the host's memory, and are put on the device a layer at a time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .. import _jax
from ._stream import Route, StackedArray, Stream


def from_host() -> "FromHost":
    """Weights come from the host's memory, one layer ahead of their use, in both directions.

    The arrays of the stack that lie in host memory are fetched; those on the device are read where
    they are. A gradient lies where its weight does: it goes back to the host layer by layer. At
    most two layers' weights are on the device.

    Returns:
        A value for `stream=` of a stack's `fold`, `scan`, `fold_via` and `scan_via`.

    Raises:
        ValueError: When the stack is run: the backend has no pinned host memory, or no array of
            the stack lies there.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> from haliax import Axis
        >>> from stackax import Stacked, stream
        >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
        >>> layers = jax.device_put(make(4, 4, key=jax.random.key(0)), jax.memory.Space.Host)
        >>> layers.fold(jnp.ones(4), stream=stream.from_host()).shape
        (4,)
    """
    return FromHost()


@dataclasses.dataclass(frozen=True)
class FromHost(Stream):
    """A stream out of host memory; made by `from_host`."""

    def routes(self, arrays: Sequence[StackedArray]) -> list[Route | None]:
        """A route for each array in host memory."""
        _check_backend()
        on_host = [_jax.is_on_host(jax.typeof(x.array)) for x in arrays]
        routes: list[Route | None] = [HostRoute() if far else None for far in on_host]
        if arrays and not any(routes):
            raise ValueError(
                "stream.from_host() fetches weights out of host memory, but all arrays of the "
                "stack are on the device: move the stack first, with "
                "jax.device_put(stack, jax.memory.Space.Host), or drop stream=."
            )
        return routes


@dataclasses.dataclass(frozen=True)
class HostRoute(Route):
    """Between host memory and the device."""

    def fetch(self, x: Any) -> Any:
        return jax.device_put(x, jax.memory.Space.Device)

    def send(self, gradient: Any) -> Any:
        return jax.device_put(gradient, jax.memory.Space.Host)

    def room(self, array: Any) -> Any:
        # Zeros would be made on the device, for all layers at once, and then moved.
        return array


def _check_backend() -> None:
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        raise ValueError(
            f"stream.from_host() needs memory of the kind 'pinned_host', but the backend "
            f"{jax.default_backend()!r} has only {sorted(kinds)}: leave the weights on the device "
            "and drop stream=, or shard them and use stream.from_shards."
        )
