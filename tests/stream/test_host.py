"""Streaming from the host: what is where, unusual stacks, and what is refused."""

import functools as ft

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import stackax
from stackax import BlockSeq, Stacked, stream
from tests.reference.programs import relative_error
from tests.zoo import (
    ATTENTION,
    MANY_TYPES,
    MIXED_MLP,
    NAMED_MLP,
    PLAIN_MLP,
    RECORDING,
    inputs,
    platform_warnings_ignored,
    via,
    weigh,
)

HOST = stream.from_host()
Space = jax.memory.Space


def on_host(tree):
    """A tree with its numbers in host memory, and its keys where they are."""

    def move(leaf):
        is_number = eqx.is_array(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.device_put(leaf, Space.Host) if is_number else leaf

    return jax.tree.map(move, tree)


def gradient(stack, x, *, scans=False, **options):
    def loss(both):
        out = via(*both, scans=scans, **options)
        return weigh(out), out

    with platform_warnings_ignored():
        return eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))((stack, x))


def check(block, n, stack, **options):
    """Compares a streamed gradient with that of the same blocks on the device."""
    x = inputs(block, n)
    expected = gradient(block.stack(n), x, scans=block.scans)
    actual = gradient(stack, x, scans=block.scans, stream=HOST, **options)
    arrays = (eqx.filter(jax.device_get(tree), eqx.is_array) for tree in (actual, expected))
    assert relative_error(*map(jax.tree.leaves, arrays)) <= block.tolerance
    return actual


@pytest.mark.parametrize(
    "block",
    (NAMED_MLP, PLAIN_MLP, MIXED_MLP, RECORDING, MANY_TYPES, ATTENTION),
    ids=lambda b: b.name,
)
def test_every_kind_of_block_can_be_streamed(block):
    check(block, 2, on_host(block.stack(2)), remat=True)


@pytest.mark.parametrize("n", (1, 2, 3, 5))
@pytest.mark.parametrize("policy", (True, "slots=1", "nested", "offload"))
def test_all_lengths_stream_under_every_policy_about_carries(n, policy):
    check(RECORDING, n, on_host(RECORDING.stack(n)), remat=policy)


@pytest.mark.parametrize("policy, unroll", ((True, 1), (True, 3), ("slots=2", 1)))
def test_a_reversed_and_an_unrolled_stack_fetch_in_their_order(policy, unroll):
    x, block = inputs(RECORDING, 6), RECORDING
    expected = gradient(block.stack(6), x, scans=True, reverse=True)
    options = {"remat": policy, "unroll": unroll, "reverse": True, "stream": HOST}
    actual = gradient(on_host(block.stack(6)), x, scans=True, **options)
    assert relative_error(jax.device_get(actual), jax.device_get(expected)) <= 1e-6


def test_gradients_lie_where_their_weights_do():
    stack = PLAIN_MLP.stack(3)
    mixed = eqx.tree_at(lambda s: s.stacked.up, stack, on_host(stack.stacked.up))
    (_, _), (gradients, _) = check(PLAIN_MLP, 3, mixed, remat=True)
    assert gradients.stacked.up.sharding.memory_kind == "pinned_host"
    assert gradients.stacked.down.sharding.memory_kind == "device"


def test_one_layer_at_a_time_is_on_the_device():
    """In the whole jaxpr, no array of all layers' weights, or gradients, is in device memory."""
    n, sizes = 6, (11, 13)
    make = Stacked.init(hax.Axis("layers", n), PLAIN_MLP.module)
    stack = on_host(make(*sizes, key=jr.key(0)))

    def loss(stack, x):
        return jnp.sum(stack.fold(x, remat=True, stream=HOST))

    closed = jax.make_jaxpr(jax.jit(jax.grad(loss)))(stack, jnp.ones((2, sizes[0])))
    spaces = {Space.Host: set(), Space.Device: set()}
    for aval in _avals(closed.jaxpr):
        spaces[aval.memory_space].add(aval.shape)
    assert (n, *sizes) in spaces[Space.Host] and sizes in spaces[Space.Device]
    assert (n, *sizes) not in spaces[Space.Device]
    assert all(var.aval.memory_space == Space.Host for var in closed.jaxpr.invars[:3])


def _avals(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (var.aval for var in eqn.outvars if hasattr(var.aval, "memory_space"))
        for param in eqn.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from (var.aval for var in inner.invars)
                yield from _avals(inner)


class Constant(eqx.Module):
    """A block without parameters."""

    def __call__(self, x, scale=1.0, shift=0.0):
        return jnp.sin(x) * scale + shift


def test_a_block_without_parameters_is_run():
    stack = Stacked(Constant(), hax.Axis("layers", 3))
    x = jnp.arange(3.0)

    def loss(x, **options):
        return jnp.sum(stack.fold(x, remat=True, **options))

    assert relative_error(jax.grad(loss)(x), jax.grad(ft.partial(loss, stream=HOST))(x)) <= 1e-6


def test_no_layers_are_no_steps():
    stack = on_host(PLAIN_MLP.stack(1))[:0]
    assert jnp.array_equal(stack.fold(jnp.ones((2, 4)), stream=HOST), jnp.ones((2, 4)))


def test_an_undifferentiated_stack_streams_under_any_policy():
    stack, x = NAMED_MLP.stack(3), NAMED_MLP.carry(jr.key(1))
    expected = stack.fold(x)
    for policy in (False, True, "minimal", "save_all"):
        assert relative_error(on_host(stack).fold(x, remat=policy, stream=HOST), expected) <= 1e-6


@pytest.mark.parametrize("policy", (False, "save_all", "minimal"))
def test_policies_about_internals_are_refused_where_they_would_be_kept(policy):
    stack, x = on_host(NAMED_MLP.stack(3)), inputs(NAMED_MLP, 3)
    with pytest.raises(ValueError, match="(?s)streamed stack.*remat=True"):
        gradient(stack, x, remat=policy, stream=HOST)


def test_forward_mode_and_forward_over_reverse_work():
    stack, x = PLAIN_MLP.stack(3), jnp.linspace(0.1, 1.0, 4)

    def loss(stack, x, **options):
        return jnp.sum(jnp.sin(stack.fold(x, remat="slots=2", **options)))

    def both(stack, x, **options):
        f = ft.partial(loss, **options)
        hessian = jax.jacfwd(jax.grad(f, argnums=1), argnums=1)(stack, x)
        return jax.jvp(ft.partial(f, stack), (x,), (jnp.ones(4),)), hessian

    expected = jax.jit(both)(stack, x)
    actual = jax.jit(ft.partial(both, stream=HOST))(on_host(stack), x)
    assert relative_error(actual, expected) <= 1e-5


def test_carries_can_be_mapped_over_and_weights_can_not():
    stack, x = PLAIN_MLP.stack(3), jnp.linspace(0.1, 1.0, 8).reshape(2, 4)

    def loss(stack, x, **options):
        return jnp.sum(jnp.sin(stack.fold(x, remat=True, **options)))

    def mapped(stack, x, **options):
        return jnp.sum(jax.vmap(lambda row: loss(stack, row, **options))(x))

    expected = jax.jit(jax.grad(mapped))(stack, x)
    actual = jax.jit(ft.partial(jax.grad(mapped), stream=HOST))(on_host(stack), x)
    assert relative_error(jax.device_get(actual), jax.device_get(expected)) <= 1e-6

    def of_stacks(stacks, x):
        return jnp.sum(jax.vmap(lambda stack: loss(stack, x, stream=HOST), axis_size=2)(stacks))

    stacks = on_host(jax.tree.map(lambda a: jnp.stack([a, a]), stack))
    with pytest.raises(ValueError, match="mapped over its weights"):
        jax.jit(jax.grad(of_stacks))(stacks, x)


def test_a_backend_without_host_memory_is_an_error(monkeypatch):
    class Memory:
        kind = "device"

    class Device:
        def addressable_memories(self):
            return [Memory()]

    stack = on_host(PLAIN_MLP.stack(2))
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(ValueError, match="(?s)'pinned_host'.*has only.*'device'.*from_shards"):
        stack.fold(jnp.ones((2, 4)), stream=HOST)


def test_a_stack_on_the_device_has_nothing_to_fetch():
    with pytest.raises(ValueError, match="jax.device_put.*Space.Host"):
        PLAIN_MLP.stack(2).fold(jnp.ones((2, 4)), stream=HOST)


def test_what_is_no_stream_and_what_can_not_stream_is_refused():
    with pytest.raises(TypeError, match="from_shards or stackax.stream.from_host"):
        PLAIN_MLP.stack(2).fold(jnp.ones((2, 4)), stream="host")
    with pytest.raises(ValueError, match="BlockSeq.*Stacked.from_layers"):
        PLAIN_MLP.stack(2, container=BlockSeq).fold(jnp.ones((2, 4)), stream=HOST)


def test_streams_are_equal_where_they_are_the_same():
    assert hash(stackax.stream.from_host()) == hash(HOST) and stackax.stream.from_host() == HOST
