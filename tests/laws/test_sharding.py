"""Law: on a mesh of eight devices, gradients are those of one device, and stay where they were.

On an Explicit mesh a carry's type says how it is sharded, and a loop has to keep it.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stackax import ScanCheckpointPolicy, Stacked
from tests.reference.programs import relative_error
from tests.zoo import (
    NESTED,
    OFFLOADED_SLOTS,
    SIMPLE,
    SLOTS1,
    SLOTS2,
    PlainMlp,
    Policy,
    layers,
    platform_warnings_ignored,
)

N, BATCH, EMBED = 4, 16, 4
ON_MESHES = [
    (SIMPLE, AxisType.Auto),
    (SIMPLE, AxisType.Explicit),
    (NESTED, AxisType.Auto),
    (NESTED, AxisType.Explicit),
    (SLOTS1, AxisType.Explicit),
    (OFFLOADED_SLOTS, AxisType.Auto),
]

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def problem():
    stacked = eqx.filter_vmap(lambda key: PlainMlp(EMBED, 8, key=key))(jr.split(jr.key(0), N))
    return stacked, jr.normal(jr.key(1), (BATCH, EMBED)), jnp.asarray(0.1)


def gradient(policy):
    """Gradients of all policies' common problem for parameters, carry and a closed-over value."""

    def loss(stacked, x, closed):
        stack = Stacked(stacked, layers(N), ScanCheckpointPolicy())
        out, seen = stack.scan_via(_step(closed), remat=policy)(x)
        return jnp.sum(jnp.sin(out)) + jnp.sum(seen)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def _step(closed):
    def step(block, x):
        y = block(x * (1 + closed))
        return y, jnp.mean(y * y, axis=0)

    return step


@ft.cache
def unsharded():
    return gradient(False)(*problem())


def mesh_of(axis_type):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type, axis_type))


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize(
    "policy, axis_type", ON_MESHES, ids=lambda x: x.name if isinstance(x, Policy) else str(x)
)
def test_gradients_on_a_mesh_equal_those_on_one_device(policy, axis_type):
    mesh, (stacked, x, closed) = mesh_of(axis_type), problem()
    with jax.set_mesh(mesh), platform_warnings_ignored():
        stacked = jax.tree.map(lambda leaf: put(mesh, leaf), stacked)
        sharded = gradient(policy.spec)(stacked, put(mesh, x, "data"), put(mesh, closed))
    assert relative_error(jax.device_get(sharded), jax.device_get(unsharded())) <= 1e-6
    if axis_type is AxisType.Explicit:
        assert sharded[1].sharding.spec[0] == "data"


def test_sharded_parameters_keep_their_sharding_in_their_gradients():
    """Hidden units are split over `model`; the stack's axis is not."""
    mesh, (stacked, x, closed) = mesh_of(AxisType.Auto), problem()
    specs = PlainMlp(EMBED, 8, key=jr.key(0))
    specs = eqx.tree_at(
        lambda m: (m.up, m.down, m.gain),
        specs,
        (
            NamedSharding(mesh, PartitionSpec(None, None, "model")),
            NamedSharding(mesh, PartitionSpec(None, "model", None)),
            NamedSharding(mesh, PartitionSpec()),
        ),
    )
    with jax.set_mesh(mesh):
        placed = jax.device_put(stacked, specs)
        sharded = gradient(SLOTS2.spec)(placed, put(mesh, x, "data"), closed)
    assert relative_error(jax.device_get(sharded), jax.device_get(unsharded())) <= 1e-6
    assert len(sharded[0].up.addressable_shards) == 8
