"""Which arguments of a loop are sliced per layer, and which every layer shares."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from haliax import Axis, NamedArray

from .._warn import warn_caller
from ..stream._stream import StackedArray
from .marks import Block, LayerIndex, PerLayer, Shared

# What happens to an array: sliced since its container says so, sliced or whole as marked, sliced
# with a warning, or sliced.
Rule = Literal["block", "per_layer", "shared", "warn", "quiet"]
_RULES: dict[type, Rule] = {Block: "block", PerLayer: "per_layer", Shared: "shared"}


class Leaf(NamedTuple):
    """What one leaf of the arguments is, so that a layer's arguments can be put together."""

    kind: Literal["per_layer", "shared", "static"]
    axes: tuple[Axis, ...] | None = None  # a NamedArray's, within the layer
    value: Any = None  # of a static leaf


class Arguments(eqx.Module):
    """Arguments taken apart into arrays with the layers first, shared arrays, and the rest.

    `block` says which of `per_layer` are a stacked block's own, and where in the block each is.
    """

    per_layer: list[jax.Array]
    shared: list[jax.Array]
    leaves: tuple[Leaf, ...] = eqx.field(static=True)
    treedef: Any = eqx.field(static=True)
    block: tuple[tuple[int, tuple], ...] = eqx.field(static=True, default=())

    def rebuild(self, per_layer: Sequence[Any], shared: Sequence[Any]) -> Any:
        """One layer's arguments, from its slices of `per_layer` and the shared arrays."""
        arrays = {"per_layer": iter(per_layer), "shared": iter(shared)}

        def put_back(leaf: Leaf):
            if leaf.kind == "static":
                return leaf.value
            array = next(arrays[leaf.kind])
            return array if leaf.axes is None else NamedArray(array, leaf.axes)

        return jax.tree.unflatten(self.treedef, [put_back(leaf) for leaf in self.leaves])

    @property
    def stacked(self) -> list[StackedArray]:
        """The arrays of the stacked block that are sliced."""
        axes = [leaf.axes for leaf in self.leaves if leaf.kind == "per_layer"]
        return [StackedArray(self.per_layer[i], axes[i], path) for i, path in self.block]

    def at(self, index: int) -> Any:
        """The arguments of layer `index`."""
        return self.rebuild([x[index] for x in self.per_layer], self.shared)


@dataclasses.dataclass(frozen=True)
class Slicer:
    """Takes the arguments of a loop over `layers` apart.

    Attributes:
        layers: The loop's axis.
        names: What messages call the positional argument of that index.
        unmarked: What happens to unmarked plain arrays: `"warn"` slices them and says so,
            `"quiet"` slices them.
        is_scanned: Which unmarked arrays may be sliced at all.
    """

    layers: Axis
    names: Callable[[int], str]
    unmarked: Literal["warn", "quiet"]
    is_scanned: Callable[[Any], bool] = lambda leaf: True

    def take_apart(self, args: tuple, kwargs: dict[str, Any]) -> Arguments:
        """Decides for every array of a call's arguments whether it is sliced or shared.

        Raises:
            ValueError: An array that is to be sliced has another size, or no axis to slice.
        """
        per_layer, shared, leaves, block = [], [], [], []
        tree, rules = _unmark((args, kwargs), self.unmarked)
        paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
        for (path, value), rule in zip(paths, rules, strict=True):
            leaf, array = self._leaf(value, rule, path)
            leaves.append(leaf)
            if rule == "block" and leaf.kind == "per_layer":
                block.append((len(per_layer), path[2:]))
            if leaf.kind != "static":
                (per_layer if leaf.kind == "per_layer" else shared).append(array)
        return Arguments(per_layer, shared, tuple(leaves), treedef, tuple(block))

    def _leaf(self, value: Any, rule: Rule, path: tuple) -> tuple[Leaf, Any]:
        if isinstance(value, LayerIndex):
            return Leaf("per_layer"), jnp.arange(self.layers.size, dtype=jnp.int32)
        if not is_array(value):
            if rule == "per_layer" and isinstance(value, (bool, int, float, complex)):
                raise ValueError(
                    f"{self._name(path)} is marked per_layer, but holds {value!r}, which is no "
                    "array: write jnp.array([...]), with one entry a layer."
                )
            return Leaf("static", value=value), None
        if rule == "shared" or (rule in ("warn", "quiet") and not self.is_scanned(value)):
            return _whole(value)
        if isinstance(value, NamedArray):
            return self._named_leaf(value, rule, path)
        if isinstance(value, (np.ndarray, np.generic)):
            value = jnp.asarray(value)
        if value.ndim == 0:
            return self._scalar_leaf(value, rule, path)
        return self._plain_leaf(value, rule, path)

    def _named_leaf(self, value: NamedArray, rule: Rule, path: tuple) -> tuple[Leaf, Any]:
        size = {axis.name: axis.size for axis in value.axes}.get(self.layers.name)
        if size is None and rule == "per_layer":
            raise ValueError(
                f"{self._name(path)} is marked per_layer, but its axes {show_axes(value.axes)} do "
                f"not include {self.layers.name!r}: add it, or mark the array stackax.shared(x)."
            )
        if size is None:
            return _whole(value)
        if size != self.layers.size:
            raise ValueError(
                f"{self._name(path)} has axes {show_axes(value.axes)}, but the loop runs over "
                f"{show_axes((self.layers,))}: give the axis that size, or another name."
            )
        value = value.rearrange((self.layers.name, ...))
        return Leaf("per_layer", value.axes[1:]), value.array

    def _scalar_leaf(self, value: Any, rule: Rule, path: tuple) -> tuple[Leaf, Any]:
        if is_key(value) and rule != "block":
            return Leaf("per_layer"), jr.split(value, self.layers.size)
        if rule == "per_layer":
            raise ValueError(
                f"{self._name(path)} is marked per_layer, but is a scalar: give it one entry for "
                f"each of {show_axes((self.layers,))}, or mark it stackax.shared(x)."
            )
        return _whole(value)

    def _plain_leaf(self, value: Any, rule: Rule, path: tuple) -> tuple[Leaf, Any]:
        if value.shape[0] != self.layers.size:
            raise ValueError(self._wrong_size(value, rule, self._name(path)))
        if rule == "warn" and not is_key(value):
            warn_caller(
                f"{self._name(path)} is a plain array of shape {value.shape}, and is sliced along "
                f"its first axis, one slice for each of {show_axes((self.layers,))}. Say "
                "stackax.per_layer(x) if that is meant, stackax.shared(x) if every layer should "
                "get the whole array."
            )
        return Leaf("per_layer"), value

    def _wrong_size(self, value: Any, rule: Rule, name: str) -> str:
        layers = f"the loop runs over {show_axes((self.layers,))}"
        if is_key(value):
            return (
                f"{name} holds {value.shape[0]} keys, but {layers}: give one key, which is split "
                f"over the layers, or {self.layers.size} keys."
            )
        cure = "its first axis must have that size."
        if rule in ("warn", "quiet"):
            cure = (
                "an unmarked plain array is sliced along its first axis. Mark it "
                "stackax.shared(x) if every layer should get the whole array."
            )
        if value.dtype == jnp.uint32 and value.shape == (2,):
            cure += " If it is a key, make it with jax.random.key, which is split over the layers."
        return f"{name} has shape {value.shape}, but {layers}: {cure}"

    def _name(self, path: tuple) -> str:
        """The caller's name for the array that `path` leads to."""
        position, rest = path[1], jax.tree_util.keystr(path[2:])
        if isinstance(position, jax.tree_util.DictKey):
            name = f"argument {position.key!r}"
        else:
            name = self.names(position.idx)
        return name + (f" at {rest}" if rest else "")


def argument_names(f: Callable, skip: int) -> Callable[[int], str]:
    """What messages call `f`'s positional arguments, counted after the first `skip`."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    fixed = [p.name for p in parameters if p.kind in kinds]
    rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]

    def name(index: int) -> str:
        index += skip
        if index < len(fixed):
            return f"argument {fixed[index]!r}"
        return f"argument '{rest[0]}[{index - len(fixed)}]'" if rest else f"argument {index}"

    return name


def infer_axis(
    name: str, args: tuple, kwargs: dict[str, Any], is_scanned: Callable[[Any], bool]
) -> Axis:
    """The axis of that name among the arguments, or one as long as the first sliced array."""
    tree, rules = _unmark((args, kwargs), "quiet")
    leaves = jax.tree.leaves(tree, is_leaf=_is_leaf)
    sliced = [
        leaf
        for leaf, rule in zip(leaves, rules, strict=True)
        if is_array(leaf) and (rule == "per_layer" or (rule == "quiet" and is_scanned(leaf)))
    ]
    for leaf in sliced:
        if isinstance(leaf, NamedArray) and name in (axis.name for axis in leaf.axes):
            return leaf.resolve_axis(name)
    for leaf in sliced:
        if not is_named(leaf) and leaf.ndim > 0:
            return Axis(name, leaf.shape[0])
    raise ValueError(
        f"no argument has the axis {name!r}, so the number of steps is unknown: give the axis as "
        f"haliax.Axis({name!r}, size)."
    )


def is_array(x: Any) -> bool:
    """Whether `x` is an array of JAX or NumPy, or stands for one."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


def is_key(x: Any) -> bool:
    """Whether `x` is an array of typed PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_named(x: Any) -> bool:
    """Whether `x` is a NamedArray."""
    return isinstance(x, NamedArray)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (NamedArray, LayerIndex))


def _unmark(tree: Any, unmarked: Rule) -> tuple[Any, list[Rule]]:
    """`tree` without its marks, and the rule that holds for each of its leaves."""
    rules: list[Any] = []

    def unmark(node):
        rule = _RULES[type(node)] if type(node) in _RULES else unmarked
        value = node.value if type(node) in _RULES else node
        rules.extend([rule] * len(jax.tree.leaves(value, is_leaf=_is_leaf)))
        return value

    return jax.tree.map(unmark, tree, is_leaf=lambda x: type(x) in _RULES or _is_leaf(x)), rules


def _whole(value: Any) -> tuple[Leaf, Any]:
    if isinstance(value, NamedArray):
        return Leaf("shared", value.axes), value.array
    return Leaf("shared"), value


def show_axes(axes: Sequence[Axis]) -> str:
    """Axes as messages write them."""
    return "{" + ", ".join(f"{axis.name}: {axis.size}" for axis in axes) + "}"
