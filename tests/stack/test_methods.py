"""fold, scan, their `_via` forms, vmap, and the options that they take per call."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax import ScanCheckpointPolicy, layer_index, shared
from tests.reference.loops import python_loop
from tests.reference.programs import equations, relative_error
from tests.zoo import (
    CONTAINERS,
    NAMED_MLP,
    RECORDING,
    NamedMlp,
    inputs,
    platform_warnings_ignored,
    step,
)

N = 3


@pytest.mark.parametrize("container", CONTAINERS)
def test_fold_calls_the_block_and_fold_via_calls_the_function(container):
    stack, x = NAMED_MLP.stack(N, container=container), inputs(NAMED_MLP, N)
    expected = x.carry
    for i, block in enumerate(NAMED_MLP.layer_list(N)):
        expected = block(expected, x.scale["layers", i], x.shift)
    for out in (
        stack.fold(x.carry, x.scale, x.shift),
        stack.fold(x.carry, scale=x.scale, shift=x.shift),
        stack.fold_via(NamedMlp.__call__)(x.carry, x.scale, shift=x.shift),
    ):
        assert relative_error(out, expected) <= 1e-6


@pytest.mark.parametrize("container", CONTAINERS)
def test_scan_calls_the_block_and_stacks_its_outputs(container):
    stack, x = RECORDING.stack(N, container=container), inputs(RECORDING, N)
    expected = python_loop(RECORDING.layer_list(N), x, scans=True)
    out = stack.scan_via(lambda b, c, *args: step(b, c, *args, closed=x.closed))(
        x.carry, x.scale, x.shift
    )
    assert relative_error(out, expected) <= 1e-6
    _, outputs = stack.scan(x.carry, x.scale, x.shift)
    assert outputs["mean"].axes[0] == stack.Layers and outputs["first"].shape[0] == N


@pytest.mark.parametrize("container", CONTAINERS)
def test_plain_outputs_of_scan_are_stacked_in_front(container):
    stack = NAMED_MLP.stack(N, container=container)
    carry = NAMED_MLP.carry(jr.key(0))
    _, (array, scalar) = stack.scan_via(lambda b, x: (b(x), (x.array, jnp.sum(x.array))))(carry)
    assert array.shape == (N, *carry.array.shape) and scalar.shape == (N,)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("reverse", [False, True])
def test_the_layer_index_counts_layers_in_both_directions(container, reverse):
    stack = NAMED_MLP.stack(N, container=container)
    seen = lambda block, x, i: (10 * x + i, i)  # noqa: E731
    x, index = stack.scan_via(seen, reverse=reverse)(jnp.asarray(0), layer_index())
    np.testing.assert_array_equal(index, np.arange(N))
    assert int(x) == (210 if reverse else 12)


@pytest.mark.parametrize("container", CONTAINERS)
def test_reverse_runs_the_last_layer_first(container):
    stack, x = NAMED_MLP.stack(N, container=container), NAMED_MLP.carry(jr.key(0))
    expected = x
    for block in reversed(NAMED_MLP.layer_list(N)):
        expected = block(expected)
    assert relative_error(stack.fold(x, reverse=True), expected) <= 1e-6
    assert relative_error(stack[::-1].fold(x), expected) <= 1e-6


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("remat", [True, "full", ScanCheckpointPolicy(), "nested"], ids=str)
def test_remat_per_call_overrules_the_stacks_own_policy(container, remat):
    without, x = NAMED_MLP.stack(N, False, container), NAMED_MLP.carry(jr.key(0))
    with_ = without.with_policy(remat)

    def tanhs(stack, **options):
        loss = lambda stack: jnp.sum(stack.fold(x, **options).array)  # noqa: E731
        jaxpr = eqx.filter_make_jaxpr(eqx.filter_grad(loss))(stack)[0]
        return sum(e.primitive.name == "tanh" for e in equations(jaxpr))

    with platform_warnings_ignored():
        assert tanhs(without) < tanhs(with_)
        assert tanhs(without, remat=remat) == tanhs(with_)
        assert tanhs(with_, remat=False) == tanhs(without)
        assert tanhs(with_, remat=None) == tanhs(with_)


@pytest.mark.parametrize("container", CONTAINERS)
def test_vmap_calls_every_block_on_the_same_input(container):
    stack, x = NAMED_MLP.stack(N, container=container), NAMED_MLP.carry(jr.key(0))
    out = stack.vmap(x)
    assert out.axes[0] == stack.Layers
    for i, block in enumerate(NAMED_MLP.layer_list(N)):
        assert relative_error(out["layers", i].rearrange(x.axes), block(x)) <= 1e-6


@pytest.mark.parametrize("container", CONTAINERS)
def test_vmap_via_without_arguments(container):
    stack = NAMED_MLP.stack(N, container=container)
    out = stack.vmap_via(lambda block: block.gain * 2)()
    np.testing.assert_allclose(out.array, [2 * float(b.gain.array) for b in stack], rtol=1e-6)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_carry_may_be_any_tree(container):
    stack = NAMED_MLP.stack(N, container=container)
    x = {"x": NAMED_MLP.carry(jr.key(0)), "n": jnp.asarray(0), "parts": (jnp.ones(2), None)}

    def count(block, c):
        return {"x": block(c["x"]), "n": c["n"] + 1, "parts": (2 * c["parts"][0], None)}

    out = stack.fold_via(count)(x)
    assert int(out["n"]) == N and out["parts"][1] is None
    np.testing.assert_array_equal(out["parts"][0], [8.0, 8.0])


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_python_number_may_be_the_carry(container):
    stack = NAMED_MLP.stack(N, container=container)
    out = stack.fold_via(lambda block, x: x + jnp.sum(block.gain.array))(0.0)
    np.testing.assert_allclose(out, sum(float(b.gain.array) for b in stack), rtol=1e-6)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_carry_keeps_its_axes_whatever_order_the_block_returns(container):
    """A block that adds in another order of axes returns a NamedArray that is equal by name."""
    stack, x = NAMED_MLP.stack(N, container=container), NAMED_MLP.carry(jr.key(0))
    turned = lambda block, x: block(x).rearrange(("embed", "batch"))  # noqa: E731
    try:
        out = stack.fold_via(turned)(x)
    except (ValueError, TypeError) as error:
        assert "carry" in str(error)
    else:
        assert relative_error(out.rearrange(x.axes), stack.fold(x)) <= 1e-6


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_dropout_key_gives_every_layer_its_own_mask(container):
    stack = NAMED_MLP.stack(N, container=container)
    mask = lambda block, x, key: (x, jr.bernoulli(key, 0.5, (64,)))  # noqa: E731
    _, masks = stack.scan_via(mask)(jnp.zeros(()), jr.key(0))
    assert not np.array_equal(masks[0], masks[1]) and not np.array_equal(masks[1], masks[2])
    _, masks = stack.scan_via(mask)(jnp.zeros(()), shared(jr.key(0)))
    assert np.array_equal(masks[0], masks[1])


@pytest.mark.parametrize("container", CONTAINERS)
def test_integer_carries_and_outputs_survive_a_gradient(container):
    stack, x = NAMED_MLP.stack(N, container=container), NAMED_MLP.carry(jr.key(0))

    def loss(x, remat):
        count = lambda b, c: ((b(c[0]), c[1] + 1), c[1])  # noqa: E731
        (x, n), seen = stack.scan_via(count, remat=remat)((x, jnp.asarray(0)))
        return hax.sum(x * x).scalar(), (n, seen)

    for remat in (False, True, "nested"):
        with platform_warnings_ignored():
            gradient, (n, seen) = jax.grad(loss, has_aux=True)(x, remat)
        assert int(n) == N and list(seen) == [0, 1, 2]
        assert gradient.axes == x.axes
