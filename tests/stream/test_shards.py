"""Streaming from shards: the ways to say a layout, and what is refused."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stackax import Stacked, stream
from stackax.stream._stream import StackedArray
from tests.reference.programs import relative_error
from tests.zoo import NAMED_MLP, PLAIN_MLP

N = 3
UP = PartitionSpec(None, None, "data")
DOWN = PartitionSpec(None, "data", None)

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def gathers(stack, x, **options) -> int:
    """How many all-gathers the program has, of a stack whose hidden units are sharded."""
    return (
        jax.jit(lambda s, x: s.fold(x, **options))
        .lower(stack, x)
        .compile()
        .as_text()
        .count(" all-gather(")
    )


def named(mesh):
    stack = NAMED_MLP.stack(N)
    with hax.axis_mapping({"hidden": "data"}):
        return hax.shard(stack), NAMED_MLP.carry(jr.key(1))


def plain(mesh):
    stack = PLAIN_MLP.stack(N)
    specs = eqx.tree_at(
        lambda block: (block.up, block.down, block.gain),
        stack.stacked,
        tuple(NamedSharding(mesh, spec) for spec in (UP, DOWN, PartitionSpec())),
    )
    placed = eqx.tree_at(lambda s: s.stacked, stack, jax.device_put(stack.stacked, specs))
    return placed, specs, PLAIN_MLP.carry(jr.key(1))


def test_named_arrays_follow_a_mapping_given_or_current(mesh):
    stack, x = named(mesh)
    expected = NAMED_MLP.stack(N).fold(x)
    given = stream.from_shards("data", {"hidden": "data"})
    assert relative_error(stack.fold(x, stream=given), expected) <= 1e-6
    assert gathers(stack, x, stream=given) > 0
    with hax.axis_mapping({"hidden": "data"}):
        assert relative_error(stack.fold(x, stream=stream.from_shards("data")), expected) <= 1e-6


def test_plain_arrays_follow_shardings_specs_or_a_function(mesh):
    stack, shardings, x = plain(mesh)
    expected = PLAIN_MLP.stack(N).fold(x)
    specs = jax.tree.map(lambda s: s.spec, shardings)

    def by_shape(array):
        return {(N, 4, 8): UP, (N, 8, 4): DOWN}.get(array.shape)

    for layout in (shardings, specs, by_shape):
        shards = stream.from_shards("data", layout)
        assert hash(shards) == hash(stream.from_shards("data", layout))
        assert relative_error(stack.fold(x, stream=shards), expected) <= 1e-6


def test_sharding_over_other_axes_stays():
    routes = _routes(stream.from_shards("data", PartitionSpec(None, ("data", "model"))))
    assert [route and route.whole for route in routes] == [
        PartitionSpec("model", None),
        PartitionSpec("model", None),
        None,
    ]


def _routes(shards):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    block = PLAIN_MLP.stack(N).stacked
    flat = jax.tree_util.tree_flatten_with_path(block)[0]
    with jax.set_mesh(mesh):
        return shards.routes([StackedArray(array, None, path) for path, array in flat])


def fold(shards, stack=None):
    stack = PLAIN_MLP.stack(N) if stack is None else stack
    return stack.fold(jnp.ones((2, 4)), stream=shards)


def test_without_a_mesh_the_error_says_how_to_set_one():
    with pytest.raises(ValueError, match="jax.set_mesh"):
        fold(stream.from_shards("data", UP))


def test_layouts_that_can_not_be_streamed_are_refused(mesh):
    with pytest.raises(ValueError, match="(?s)'expert'.*'data', 'model'"):
        fold(stream.from_shards("expert", PartitionSpec(None, "expert")))
    with pytest.raises(ValueError, match="no array of the stack is sharded over it"):
        fold(stream.from_shards("data"))
    with pytest.raises(ValueError, match="the layers' axis is sharded"):
        fold(stream.from_shards("data", PartitionSpec("data")))
    with pytest.raises(ValueError, match="more entries"):
        fold(stream.from_shards("data", PartitionSpec(None, None, None, "data")))
    with pytest.raises(TypeError, match="mesh_axis"):
        stream.from_shards(3)
    with pytest.raises(TypeError, match="PartitionSpecs or NamedShardings"):
        stream.from_shards("data", ["data"])


def test_inside_shard_map_the_axis_is_split_already(mesh):
    shards = stream.from_shards("data", PartitionSpec(None, "data"))
    mapped = jax.shard_map(
        lambda x: PLAIN_MLP.stack(N).fold(x, stream=shards),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    with pytest.raises(ValueError, match="shard_map has split"):
        mapped(jnp.ones((4, 4)))


def test_a_block_without_parameters_is_run(mesh):
    class Sine(eqx.Module):
        def __call__(self, x):
            return jnp.sin(x)

    stack = Stacked(Sine(), hax.Axis("layers", N))
    shards = stream.from_shards("data")
    gradient = jax.grad(lambda x: jnp.sum(stack.fold(x, remat=True, stream=shards)))
    expected = jax.grad(lambda x: jnp.sum(stack.fold(x)))
    x = jnp.arange(3.0)
    assert relative_error(gradient(x), expected(x)) <= 1e-6
