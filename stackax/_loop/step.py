"""A user's function of one layer as a function of lists of arrays, which is what loops take."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from .slicing import Arguments, is_array, is_named, show_axes

Arrays = list[Any]


class Step:
    """`f(carry, *args, **kwargs) -> (carry, output)` over flat lists of arrays.

    Called with a carry's arrays, a layer's slices and the shared arrays, it returns the new carry's
    arrays and the output's. It checks that the carry keeps its type, and remembers the structure of
    the outputs, which is the same for every layer.

    Attributes:
        init: The arrays of the first carry.
    """

    def __init__(self, f: Callable, init: Any, arguments: Arguments, layers: Axis):
        self._f = f
        self._arguments = arguments
        self._layers = layers
        leaves, self._treedef = jax.tree.flatten(init)
        self._static = [None if _is_numeric(leaf) else leaf for leaf in leaves]
        self.init: Arrays = [jnp.asarray(leaf) for leaf in leaves if _is_numeric(leaf)]
        self._outputs: Any = None

    def __call__(self, carry: Arrays, per_layer: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
        args, kwargs = self._arguments.rebuild(per_layer, shared)
        return self.apply(self._f, carry, args, kwargs)

    def apply(self, f: Callable, carry: Arrays, args: tuple, kwargs: dict) -> tuple[Arrays, Arrays]:
        """The same with another function, on arguments that are a layer's already."""
        result = f(self.carry(carry), *args, **kwargs)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise ValueError(
                "a block that is scanned must return a pair (carry, output), but it returned "
                f"{_type_of(result)}: return the pair, or use fold."
            )
        new_carry, output = result
        return self._check_carry(carry, new_carry), self._take_output(output)

    def carry(self, arrays: Arrays) -> Any:
        """The carry whose arrays these are."""
        arrays_left = iter(arrays)
        leaves = [next(arrays_left) if leaf is None else leaf for leaf in self._static]
        return jax.tree.unflatten(self._treedef, leaves)

    def outputs(self, stacked: Arrays) -> Any:
        """The outputs of all layers, from arrays with the layers first."""
        treedef, axes = self._outputs
        leaves = [
            array if own is None else NamedArray(array, (self._layers, *own))
            for array, own in zip(stacked, axes, strict=True)
        ]
        return jax.tree.unflatten(treedef, leaves)

    def _check_carry(self, old: Arrays, new_carry: Any) -> Arrays:
        leaves, treedef = jax.tree.flatten(new_carry)
        if treedef != self._treedef:
            raise TypeError(
                "the carry must come out of a block as it went in, but it went in as "
                f"{_type_of(self.carry(old))} and came out as {_type_of(new_carry)}."
            )
        numeric = [leaf for leaf in leaves if _is_numeric(leaf)]
        static = [None if _is_numeric(leaf) else leaf for leaf in leaves]
        if len(numeric) != len(old) or static != self._static:
            raise TypeError(
                "the parts of a carry that are not arrays must not change, but they went in as "
                f"{self._static} and came out as {static}."
            )
        new = [jnp.asarray(leaf) for leaf in numeric]
        for before, after in zip(old, new, strict=True):
            same = before.dtype == after.dtype or jax.typeof(before).weak_type
            if before.shape != after.shape or not same:
                raise TypeError(
                    "the carry must keep its type, but an array of it went in as "
                    f"{_type_of(before)} and came out as {_type_of(after)}: cast or reshape it "
                    "in the block, or make the first carry of that type."
                )
        return new

    def _take_output(self, output: Any) -> Arrays:
        paths, treedef = jax.tree_util.tree_flatten_with_path(output, is_leaf=is_named)
        arrays, axes = [], []
        for path, leaf in paths:
            if not _is_numeric(leaf) and not is_named(leaf):
                raise TypeError(
                    f"a block's output must consist of arrays, but{_at(path)} it has "
                    f"{leaf!r}, a {type(leaf).__name__}."
                )
            if is_named(leaf) and self._layers.name in (axis.name for axis in leaf.axes):
                raise ValueError(
                    f"a block's output has the axis {self._layers.name!r} already{_at(path)}, "
                    "which stacking it would add: rename that axis in the block."
                )
            axes.append(leaf.axes if is_named(leaf) else None)
            arrays.append(jnp.asarray(leaf.array if is_named(leaf) else leaf))
        if self._outputs is not None and self._outputs != (treedef, axes):
            raise ValueError(
                f"blocks must return outputs of one type, but one returned {_type_of(output)}, "
                "and one before it something else."
            )
        self._outputs = (treedef, axes)
        return arrays


def _is_numeric(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, (bool, int, float, complex))


def _type_of(tree: Any) -> str:
    """A pytree with its arrays written as dtype[shape], NamedArrays with their axes."""

    def show(leaf):
        if is_named(leaf):
            return _Text(f"{leaf.dtype}{show_axes(leaf.axes)}")
        if is_array(leaf):
            return _Text(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]")
        return leaf

    return repr(jax.tree.map(show, tree, is_leaf=is_named))


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


def _at(path: tuple) -> str:
    where = jax.tree_util.keystr(path)
    return f" at {where}" if where else ""
