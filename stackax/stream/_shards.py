"""Weights that lie in shards over a mesh axis, and are gathered a layer at a time."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ._stream import Route, StackedArray, Stream

MeshAxes = tuple[str, ...]


def from_shards(
    mesh_axis: str | Sequence[str],
    layout: Mapping[str, Any] | Callable[[Any], PartitionSpec] | Any = None,
) -> "FromShards":
    """Weights come from shards over a mesh axis, gathered one layer ahead, in both directions.

    This is fully sharded data parallelism: every device holds a share of each layer's weights, a
    layer's weights are gathered while the layer before it runs, and its gradients leave as shards
    (reduce-scattered where the backend has that). At most two layers' gathered weights are live.
    Arrays that are not sharded over the mesh axis are read where they are. Needs a mesh:
    `jax.set_mesh`.

    Args:
        mesh_axis: The axis of the mesh that the weights are gathered over, or several of them.
            Sharding over other axes, as in tensor parallelism, stays as it is.
        layout: How the stack's arrays are sharded, which a program can't see from within. For
            NamedArrays a mapping of axis names to mesh axes; if not given, the current
            `haliax.axis_mapping`. For plain arrays a pytree of `PartitionSpec`s or shardings of
            the form of the block, or of its beginning; or a function of the array. A spec is
            that of the array as it lies in the stack, with the layers' axis in its place.

    Returns:
        A value for `stream=` of a stack's `fold`, `scan`, `fold_via` and `scan_via`.

    Raises:
        ValueError: When the stack is run: there is no mesh, or it has no such axis; no array of
            the stack is sharded over it; the layers' axis is sharded.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> from haliax import Axis
        >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
        >>> from stackax import Stacked, stream
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
        >>> layers = make(4, 4, key=jax.random.key(0))
        >>> layers = jax.device_put(layers, NamedSharding(mesh, PartitionSpec(None, "data")))
        >>> with jax.set_mesh(mesh):
        ...     shards = stream.from_shards("data", PartitionSpec(None, "data"))
        ...     layers.fold(jnp.ones(4), stream=shards).shape
        (4,)

    References:
        Zhao et al. (2023), "PyTorch FSDP", section 3.3.2 on prefetching.
    """
    axes = (mesh_axis,) if isinstance(mesh_axis, str) else mesh_axis
    if not isinstance(axes, Sequence) or not axes or not all(isinstance(a, str) for a in axes):
        raise TypeError(f"mesh_axis must name a mesh axis, or several, not {mesh_axis!r}.")
    return FromShards(tuple(axes), _frozen(layout))


@dataclasses.dataclass(frozen=True)
class ByAxis:
    """A layout as a mapping of axis names to mesh axes, or the current one of Haliax."""

    mapping: tuple[tuple[str, Any], ...] | None

    def spec(self, x: StackedArray) -> PartitionSpec | None:
        """The layout of a NamedArray's slice; None for a plain array."""
        if x.axes is None:
            return None
        mapping = hax.partitioning.current_thread_local_mapping() or {}
        if self.mapping is not None:
            mapping = dict(self.mapping)
        return PartitionSpec(*(mapping.get(axis.name) for axis in x.axes))


@dataclasses.dataclass(frozen=True)
class ByPath:
    """A layout as a pytree of specs, by where in the block they are."""

    specs: tuple[tuple[tuple, PartitionSpec], ...]

    def spec(self, x: StackedArray) -> PartitionSpec | None:
        """The layout of a slice; None where the pytree has nothing."""
        for path, spec in self.specs:
            shared = min(len(path), len(x.path))
            if path[:shared] == x.path[:shared]:
                return _of_a_layer(spec, x)
        return None


@dataclasses.dataclass(frozen=True)
class ByFunction:
    """A layout as a function of the array."""

    f: Callable[[Any], Any]

    def spec(self, x: StackedArray) -> PartitionSpec | None:
        """The layout of a slice; None where the function says None."""
        spec = self.f(x.array)
        return None if spec is None else _of_a_layer(_as_spec(spec), x)


@dataclasses.dataclass(frozen=True)
class FromShards(Stream):
    """A stream out of shards; made by `from_shards`.

    Attributes:
        mesh_axes: What is gathered over.
        layout: How the arrays are sharded.
    """

    mesh_axes: MeshAxes
    layout: ByAxis | ByPath | ByFunction

    def routes(self, arrays: Sequence[StackedArray]) -> list[Route | None]:
        """A route for each array that is sharded over the mesh axes."""
        self._check_mesh()
        routes = [self._route(x) for x in arrays]
        if arrays and not any(routes):
            raise ValueError(
                f"stream.from_shards gathers over {self._named()}, but by its layout no array of "
                "the stack is sharded over it: give layout=, a mapping such as "
                f"{{'embed': {self.mesh_axes[0]!r}}} for NamedArrays, PartitionSpecs for plain "
                "arrays; or drop stream=."
            )
        return routes

    def _route(self, x: StackedArray) -> Route | None:
        spec = self.layout.spec(x)
        if spec is None:
            return None
        whole = PartitionSpec(*(_without(entry, self.mesh_axes) for entry in spec))
        return ShardsRoute(spec, whole) if whole != spec else None

    def _check_mesh(self) -> None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                "stream.from_shards needs a mesh: run the stack under `with jax.set_mesh(mesh):`."
            )
        for axis in self.mesh_axes:
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"stream.from_shards gathers over {axis!r}, but the mesh has the axes "
                    f"{list(mesh.axis_names)}."
                )
            if axis in mesh.manual_axes:
                raise ValueError(
                    f"stream.from_shards gathers over {axis!r}, which shard_map has split already: "
                    "run the stack outside shard_map, or leave this axis out of its axis_names."
                )

    def _named(self) -> str:
        return " and ".join(map(repr, self.mesh_axes))


@dataclasses.dataclass(frozen=True)
class ShardsRoute(Route):
    """Between shards and whole arrays.

    Attributes:
        shards: How a layer's slice is sharded.
        whole: The same without the mesh axes that are gathered over.
    """

    shards: PartitionSpec
    whole: PartitionSpec

    def fetch(self, x: Any) -> Any:
        # Constrained to its shards first, the slice loses its axis of one layer before it is
        # gathered; else XLA gathers with that axis, and drops it in a copy of the whole layer.
        return _constrain(_constrain(x, self.shards), self.whole)

    def send(self, gradient: Any) -> Any:
        return _constrain(gradient, self.shards)

    def room(self, array: Any) -> Any:
        return _constrain(jnp.zeros_like(array), PartitionSpec(None, *self.shards))


def _constrain(x: Any, spec: PartitionSpec) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    axes = [axis for entry in spec for axis in _axes(entry)]
    if mesh.are_all_axes_explicit or any(axis in mesh.explicit_axes for axis in axes):
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)


def _frozen(layout: Any) -> ByAxis | ByPath | ByFunction:
    if layout is None:
        return ByAxis(None)
    if isinstance(layout, Mapping) and not any(map(_is_spec, jax.tree.leaves(layout))):
        return ByAxis(tuple((name, _frozen_axes(axes)) for name, axes in layout.items()))
    if _is_spec(layout) or not isinstance(layout, Callable) or jax.tree.leaves(layout) != [layout]:
        flat = jax.tree_util.tree_flatten_with_path(layout, is_leaf=_is_spec)[0]
        return ByPath(tuple((path, _as_spec(leaf)) for path, leaf in flat))
    return ByFunction(layout)


def _frozen_axes(axes: Any) -> Any:
    return axes if axes is None or isinstance(axes, str) else tuple(axes)


def _is_spec(x: Any) -> bool:
    return isinstance(x, (PartitionSpec, NamedSharding))


def _as_spec(x: Any) -> PartitionSpec:
    spec = getattr(x, "spec", x)
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            "the layout of stream.from_shards consists of PartitionSpecs or NamedShardings, but "
            f"it has {x!r}."
        )
    return spec


def _of_a_layer(spec: PartitionSpec, x: StackedArray) -> PartitionSpec:
    """The spec of a layer's slice, of as many entries as it has axes."""
    layers, *rest = (*spec, None) if len(spec) == 0 else spec
    if layers is not None:
        raise ValueError(
            f"stream.from_shards can't gather {jax.tree_util.keystr(x.path)} a layer at a time: "
            f"by its layout {spec} the layers' axis is sharded. Shard another axis of it."
        )
    if len(rest) > x.array.ndim - 1:
        if x.array.ndim == 1:  # a scalar a layer, under a spec for the whole block
            return PartitionSpec()
        raise ValueError(
            f"the layout {spec} of stream.from_shards has more entries than "
            f"{jax.tree_util.keystr(x.path)} has axes, which has {x.array.ndim}."
        )
    return PartitionSpec(*rest, *[None] * (x.array.ndim - 1 - len(rest)))


def _axes(entry: Any) -> MeshAxes:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _without(entry: Any, mesh_axes: MeshAxes) -> Any:
    if not set(_axes(entry)) & set(mesh_axes):
        return entry
    left = tuple(axis for axis in _axes(entry) if axis not in mesh_axes)
    return left[0] if len(left) == 1 else left or None
