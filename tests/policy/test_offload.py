"""Offloading: what goes to the host, what never does, and what it costs on a CPU."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from stackax import BlockSeq, ScanCheckpointPolicy, Stacked, checkpoint_name
from stackax._policy import lower
from tests.reference.programs import host_shapes, temp_bytes
from tests.zoo import layers, platform_warnings_ignored

# Sizes that tell every array from every other by its shape.
N, BATCH, WIDTH, HIDDEN = 7, 6, 5, 11
CARRY, INNER = (BATCH, WIDTH), (BATCH, HIDDEN)


class Mlp(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __init__(self, *, key):
        self.up, self.down = jr.normal(key, (WIDTH, HIDDEN)), jr.normal(key, (HIDDEN, WIDTH))

    def __call__(self, x, shift=0.0):
        return x + checkpoint_name(jnp.tanh(x @ self.up), "inner") @ self.down + shift


def stack_of(policy, container=Stacked, n: int = N):
    make = container.init(layers(n), Mlp, gradient_checkpointing=policy)
    return make(key=jr.key(0))


def loss(stack, x, shift):
    return jnp.sum(stack.fold(x, shift) ** 2)


def hosted(stack) -> set[tuple[int, ...]]:
    """The shapes that the gradient's program places on the host."""
    x, shift = jnp.ones(CARRY), jnp.ones(())
    with platform_warnings_ignored():
        jaxpr = eqx.filter_make_jaxpr(eqx.filter_grad(lambda args: loss(*args)))
        return host_shapes(jaxpr((stack, x, shift))[0])


def _per_layer(shape):
    return {shape, (1, *shape), (N, *shape)}


@pytest.mark.parametrize("container", [Stacked, BlockSeq])
def test_offloaded_carries_and_nothing_else_are_on_the_host(container):
    shapes = hosted(stack_of(ScanCheckpointPolicy(save_carries="offload"), container))
    assert shapes and shapes <= _per_layer(CARRY)


@pytest.mark.parametrize("container", [Stacked, BlockSeq])
def test_offloaded_names_and_nothing_else_are_on_the_host(container):
    shapes = hosted(stack_of(ScanCheckpointPolicy(offload_block_internals=["inner"]), container))
    assert shapes and shapes <= _per_layer(INNER)


def test_the_alias_offload_sends_carries_but_never_weights():
    shapes = hosted(stack_of("offload"))
    assert shapes and shapes <= _per_layer(CARRY)


@pytest.mark.parametrize("field", [dict(slots=3), dict(nested=True), dict(nested=2)], ids=str)
def test_offloaded_slots_and_nothing_else_are_on_the_host(field):
    shapes = hosted(stack_of(ScanCheckpointPolicy(save_carries="offload", **field)))
    assert shapes and all(shape[-2:] == CARRY for shape in shapes)
    assert all(len(shape) <= 3 and (len(shape) == 2 or shape[0] <= 5) for shape in shapes)


@pytest.mark.parametrize(
    "policy", [False, True, "save_all", ScanCheckpointPolicy(slots=3), "nested"], ids=str
)
def test_without_an_offload_nothing_is_on_the_host(policy):
    assert not hosted(stack_of(policy))


OFFLOADED_AND_SAVED = {
    "carries": (ScanCheckpointPolicy(save_carries="offload"), ScanCheckpointPolicy()),
    "names": (
        ScanCheckpointPolicy(offload_block_internals=["inner"]),
        ScanCheckpointPolicy(save_block_internals=["inner"]),
    ),
    "slots": (
        ScanCheckpointPolicy(save_carries="offload", slots=3),
        ScanCheckpointPolicy(slots=3),
    ),
}


@pytest.mark.parametrize("what", OFFLOADED_AND_SAVED)
def test_on_a_cpu_offloading_plans_no_byte_more_than_saving(what):
    x, shift = jnp.ones((BATCH * 64, WIDTH)), jnp.ones(())

    def planned(policy):
        with platform_warnings_ignored():
            return temp_bytes(lambda stack: loss(stack, x, shift), stack_of(policy))

    offloaded, saved = OFFLOADED_AND_SAVED[what]
    assert planned(offloaded) <= planned(saved)


def test_the_warning_that_an_offload_saves_nothing_comes_once():
    lower._warn_once.cache_clear()  # Once in a process, so that this one has to start anew.
    x = jnp.ones(CARRY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (2, 2, 3):
            for policy in ("offload", ScanCheckpointPolicy(offload_block_internals=["inner"])):
                jax.make_jaxpr(jax.grad(lambda x, s: loss(s, x, 0.0)))(x, stack_of(policy, n=n))
    assert len(caught) == 1 and issubclass(caught[0].category, UserWarning)
    assert "host" in str(caught[0].message) and caught[0].filename == __file__
