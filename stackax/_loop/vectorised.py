"""Running a function on all layers at once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from .slicing import Arguments, Leaf, is_array, is_named, show_axes


def run_vectorised(f: Callable, arguments: Arguments, layers: Axis) -> Any:
    """What `f` returns for each layer's arguments, stacked along `layers`.

    Arrays get the layers first; what is no array is the same for all layers, and passes.
    """
    structure: list[Any] = []

    def one(slices: list) -> list:
        args, kwargs = arguments.rebuild(slices, arguments.shared)
        leaves, treedef = jax.tree.flatten(f(*args, **kwargs), is_leaf=is_named)
        structure[:] = [treedef, [_without_array(leaf) for leaf in leaves]]
        return [
            jnp.asarray(leaf.array if is_named(leaf) else leaf) for leaf in leaves if is_array(leaf)
        ]

    mesh_axis = hax.partitioning.physical_axis_name(layers)
    arrays = iter(
        jax.vmap(one, axis_size=layers.size, spmd_axis_name=mesh_axis)(arguments.per_layer)
    )

    def put_back(leaf: Leaf) -> Any:
        if leaf.kind == "static":
            return leaf.value
        return next(arrays) if leaf.axes is None else NamedArray(next(arrays), (layers, *leaf.axes))

    treedef, leaves = structure
    return jax.tree.unflatten(treedef, [put_back(leaf) for leaf in leaves])


def stack_trees(trees: Sequence[Any], layers: Axis) -> Any:
    """Pytrees that are alike, stacked along `layers`."""

    def stack(*leaves: Any) -> Any:
        if is_named(leaves[0]):
            array = jnp.stack([leaf.array for leaf in leaves])
            return NamedArray(array, (layers, *leaves[0].axes))
        return jnp.stack(leaves) if is_array(leaves[0]) else leaves[0]

    return jax.tree.map(stack, *trees, is_leaf=is_named)


def check_alike(trees: Sequence[Any], names: Sequence[str], cure: str) -> None:
    """Checks that pytrees can be stacked.

    Args:
        trees: The pytrees.
        names: What messages call them.
        cure: What messages say to do.

    Raises:
        ValueError: They differ in structure, axes, shapes, dtypes, or in what is no array.
    """
    flat = [jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named) for tree in trees]
    for tree, name, (leaves, structure) in zip(trees, names, flat, strict=True):
        if structure != flat[0][1]:
            where, a, b = _first_difference(tree, trees[0]) or ("", structure, flat[0][1])
            at = f" at {where}" if where else ""
            raise ValueError(f"{name} differs from {names[0]}{at}: it is {a}, not {b}. {cure}")
        for (path, a), (_, b) in zip(leaves, flat[0][0], strict=True):
            if _kind(a) != _kind(b):
                raise ValueError(
                    f"{name} differs from {names[0]} at {jax.tree_util.keystr(path)}: it is "
                    f"{_kind(a)}, not {_kind(b)}. {cure}"
                )


def _first_difference(a: Any, b: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Where two pytrees of different structure part, and what stands there."""
    if type(a) is not type(b):
        return where, _description(a), _description(b)
    if dataclasses.is_dataclass(a) and not is_named(a):
        fields = dataclasses.fields(a)
        parts = [(f".{f.name}", getattr(a, f.name), getattr(b, f.name)) for f in fields]
    elif isinstance(a, dict) and a.keys() == b.keys():
        parts = [(f"[{key!r}]", a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return where, f"{len(a)} long", f"{len(b)} long"
        parts = [(f"[{i}]", *pair) for i, pair in enumerate(zip(a, b, strict=True))]
    elif is_named(a) or is_array(a):
        return None if _kind(a) == _kind(b) else (where, _kind(a), _kind(b))
    else:
        return None if a == b else (where, repr(a), repr(b))
    found = (_first_difference(x, y, where + name) for name, x, y in parts)
    return next((difference for difference in found if difference), None)


def _description(x: Any) -> str:
    if is_named(x) or is_array(x):
        return _kind(x)
    return "None" if x is None else type(x).__name__


def _without_array(leaf: Any) -> Leaf:
    if not is_array(leaf):
        return Leaf("static", value=leaf)
    return Leaf("per_layer", leaf.axes if is_named(leaf) else None)


def _kind(leaf: Any) -> Any:
    """What must be the same in all layers: the type of an array, or the value of anything else."""
    if is_named(leaf):
        return f"{leaf.dtype}{show_axes(leaf.axes)}"
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else leaf
