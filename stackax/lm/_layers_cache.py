"""Running a stack whose layers each remember something, in place."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from haliax import Axis, NamedArray

from .._loop.marks import layer_index
from .._stack.stacked import Stacked

T = TypeVar("T")


def add_layers(cache: T, Layers: Axis) -> T:
    """As many copies of a layer's empty memory as there are layers, along a first axis.

    Args:
        cache: What one layer remembers, a pytree of NamedArrays.
        Layers: The layers.

    Returns:
        The pytree, its arrays with `Layers` first.

    Example:
        >>> import haliax as hax
        >>> from stackax.lm._layers_cache import add_layers
        >>> add_layers(hax.zeros({"state": 4}), hax.Axis("layers", 2)).shape
        {'layers': 2, 'state': 4}
    """
    return _map(lambda x: x.broadcast_axis(Layers).rearrange((Layers.name, ...)), cache)


def fold_with_cache(
    stack: Stacked,
    call: Callable[[Any, NamedArray, Any], tuple[NamedArray, Any]],
    x: NamedArray,
    cache: T,
) -> tuple[NamedArray, T]:
    """Runs the layers one after the other, each with its own part of the cache.

    The cache is carried from layer to layer and written where it lies. As a per-layer argument it
    would be read from one buffer and written to another, which copies all of it at every call.

    Args:
        stack: The layers.
        call: `call(block, x, cache) -> (x, cache)` for one layer and its part.
        x: The residual stream.
        cache: What the layers remember, with their axis first.

    Returns:
        The residual stream after the last layer, and the cache.
    """

    def run_layer(block, carry, index):
        x, cache = carry
        x, new = call(block, x, _map(lambda part: _take(part, index), cache))
        put = jax.tree.map(lambda old, new: _put(old, new, index), cache, new, is_leaf=_is_named)
        return x, put

    # x: (batch axes and, in prefill, positions; Embed); the cache: as it is given. Nothing else
    # passes from layer to layer.
    return stack.fold_via(run_layer)((x, cache), layer_index())


def _take(part: NamedArray, index) -> NamedArray:
    array = jax.lax.dynamic_index_in_dim(part.array, index, 0, keepdims=False)
    return NamedArray(array, part.axes[1:])


def _put(old: NamedArray, new: NamedArray, index) -> NamedArray:
    array = jax.lax.dynamic_update_index_in_dim(old.array, new.array, index, 0)
    return NamedArray(array, old.axes)


def _map(f: Callable, tree: Any) -> Any:
    return jax.tree.map(f, tree, is_leaf=_is_named)


def _is_named(x: Any) -> bool:
    return isinstance(x, NamedArray)
