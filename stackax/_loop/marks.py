"""Marks that say what a loop does with an argument."""

from typing import Any

import equinox as eqx


class PerLayer(eqx.Module):
    """An argument of which each layer gets its own slice; made by `per_layer`."""

    value: Any


class Shared(eqx.Module):
    """An argument that every layer gets whole; made by `shared`."""

    value: Any


class Block(eqx.Module):
    """A stacked block, sliced without a word; for containers, which know what they hold."""

    value: Any


class LayerIndex(eqx.Module):
    """A place for the layer's index; made by `layer_index`."""


def per_layer(x: Any) -> PerLayer:
    """Marks an argument of which each layer is to get its own slice.

    Plain arrays are sliced along their first axis, NamedArrays along the loop's axis.

    Args:
        x: A pytree of arrays, each with the loop's axis.

    Returns:
        The marked argument, for `fold`, `scan`, `map`, and the methods of a stack.

    Example:
        >>> import jax.numpy as jnp
        >>> from haliax import Axis
        >>> from stackax import fold, per_layer
        >>> add = fold(lambda carry, x: carry + x, Axis("layers", 3))
        >>> float(add(0.0, per_layer(jnp.array([1.0, 2.0, 3.0]))))
        6.0
    """
    return PerLayer(x)


def shared(x: Any) -> Shared:
    """Marks an argument that every layer is to get whole, whatever its shape.

    Args:
        x: Any pytree.

    Returns:
        The marked argument, for `fold`, `scan`, `map`, and the methods of a stack.

    Example:
        >>> import jax.numpy as jnp
        >>> from haliax import Axis
        >>> from stackax import fold, shared
        >>> add = fold(lambda carry, x: carry + x.sum(), Axis("layers", 3))
        >>> float(add(0.0, shared(jnp.array([1.0, 2.0, 3.0]))))
        18.0
    """
    return Shared(x)


def layer_index() -> LayerIndex:
    """Asks for the layer's index in an argument's place.

    Returns:
        A placeholder; the block gets an int32 scalar, from 0 to the number of layers less one,
        counted from the first layer in whatever direction the loop runs.

    Example:
        >>> from haliax import Axis
        >>> from stackax import fold, layer_index
        >>> int(fold(lambda carry, i: carry + i, Axis("layers", 4))(0, layer_index()))
        6
    """
    return LayerIndex()
