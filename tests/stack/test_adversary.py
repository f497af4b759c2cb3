"""What an adversary found in the containers, each a sentence that was once false."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import PartitionSpec

from stackax import BlockSeq, ScanCheckpointPolicy, Stacked, fold, per_layer, scan
from tests.zoo import platform_warnings_ignored

Layers = Axis("layers", 4)


class Echo(eqx.Module):
    weight: jax.Array

    def __call__(self, carry, value):
        return carry, jnp.asarray(value)


class Scaled(eqx.Module):
    weight: jax.Array

    def __call__(self, carry, config):
        return carry + config.scale + 0 * self.weight


class Config:
    scale = 1.0


class Tanh(eqx.Module):
    weight: jax.Array

    def __init__(self, *, key):
        self.weight = jax.random.normal(key, (3, 3))

    def __call__(self, x):
        return jnp.tanh(self.weight @ x)


def tanh_stack() -> Stacked:
    return Stacked.init(Layers, Tanh)(key=jax.random.key(0))


def test_eager_calls_with_equal_numbers_of_other_types_are_told_apart():
    stack = Stacked(Echo(jnp.zeros(4)), Layers)
    dtypes = [stack.scan(0.0, value)[1].dtype for value in (1, 1.0, True)]
    assert dtypes == [jnp.int32, jnp.float32, jnp.bool_]


def test_an_eager_call_sees_what_an_object_holds_now():
    stack, config = Stacked(Scaled(jnp.zeros(4)), Layers), Config()
    assert stack.fold(0.0, config) == 4
    config.scale = 10.0
    assert stack.fold(0.0, config) == 40


def test_a_stack_whose_arrays_lack_layers_gives_out_none():
    stack = Stacked(tanh_stack().stacked, Axis("layers", 6))
    with pytest.raises(ValueError, match="6 layers"):
        stack.get_layer(5)


def test_loading_another_shape_raises_and_names_the_array():
    stack = tanh_stack()
    cut = {key: array[:2] for key, array in stack.to_state_dict("a").items()}
    with pytest.raises(ValueError, match=r"a\.0\.weight"):
        stack.from_state_dict(cut, "a")


@pytest.mark.parametrize("container", [Stacked, BlockSeq])
def test_loading_under_a_wrong_prefix_says_what_is_missing(container):
    stack = container.from_layers(list(tanh_stack()))
    with pytest.raises(ValueError, match="lacks layers"):
        stack.from_state_dict(stack.to_state_dict("a"), "b")


def test_numpy_arrays_load_on_a_mesh():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    stack = Stacked.init(Layers, hax.nn.LayerNorm)(Axis("embed", 8))
    arrays = {key: np.asarray(x) for key, x in stack.to_state_dict("p").items()}
    with jax.set_mesh(mesh), hax.axis_mapping({"embed": "d"}):
        loaded = stack.from_state_dict(arrays, "p")
    np.testing.assert_array_equal(loaded.stacked.weight.array, stack.stacked.weight.array)


def test_a_block_that_exists_already_is_no_factory():
    with pytest.raises(TypeError, match="from_layers"):
        Stacked.init(Layers, tanh_stack()[0])


def test_numbers_marked_per_layer_are_refused():
    with pytest.raises(ValueError, match="no array"):
        fold(lambda carry, x: carry + x, Layers)(0.0, per_layer([1.0, 2.0, 3.0, 4.0]))


def test_a_length_is_not_inferred_from_an_array_that_is_not_scanned():
    with pytest.raises(ValueError, match="number of steps is unknown"):
        scan(lambda c, m: (c, m), "t", is_scanned=False)(0.0, jnp.ones((7, 7)))


def test_outputs_under_slots_work_inside_shard_map():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(policy):
        def body(w, x):
            step = lambda c, w: (jnp.sin(c) * w, c.sum())  # noqa: E731
            carry, sums = scan(step, Axis("t", 5), remat=policy)(x, w)
            return jax.lax.psum(carry.sum() + sums.sum(), "d")

        specs = (PartitionSpec(), PartitionSpec("d"))
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())

    args = jnp.linspace(0.5, 1.5, 5), jnp.linspace(0.1, 0.8, 8)
    ours, plain = (
        jax.jit(jax.grad(loss(policy)))(*args) for policy in (ScanCheckpointPolicy(slots=2), False)
    )
    np.testing.assert_allclose(ours, plain, rtol=1e-6)


@platform_warnings_ignored()
def test_nested_loops_over_one_axis_name_keep_their_own_carries():
    def outer(carry, w):
        step = lambda c, u: jnp.sin(c) * u  # noqa: E731
        return fold(step, Axis("layers", 2), remat="offload")(carry, w)

    def loss(w):
        return fold(outer, Axis("layers", 3), remat="offload")(jnp.ones(4), w).sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((3, 2, 4))))
    assert "<host>[3,4]" in jaxpr and "<host>[3,2,4]" not in jaxpr
