import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from haliax import Axis

from stackax.transformer import apply_rotary
from tests.reference import transformer as reference

Pos, Heads, HeadDim = hax.make_axes(position=5, heads=2, head_dim=8)
rotary = eqx.filter_jit(apply_rotary)


@pytest.mark.parametrize("theta", [10_000.0, 7.0])
def test_it_agrees_with_float64_numpy_also_at_large_positions(theta):
    x = hax.random.normal(jr.key(0), (Pos, Heads, HeadDim))
    positions = np.array([0, 1, 2, 17, 900])
    ours = rotary(x, hax.named(positions, Pos), HeadDim, theta=theta)
    # An angle of 900 is only known to 900 * 2**-24 in float32.
    np.testing.assert_allclose(ours.array, reference.rotary(x.array, positions, theta), atol=2e-4)
    near = rotary(x, hax.arange(Pos), HeadDim, theta=theta)
    np.testing.assert_allclose(near.array, reference.rotary(x.array, range(5), theta), atol=1e-6)


def test_products_depend_on_positions_only_through_their_difference():
    q, k = (hax.random.normal(jr.key(i), (Pos, HeadDim)) for i in (0, 1))

    def products(shift):
        turned = (rotary(x, hax.arange(Pos) + shift, HeadDim) for x in (q, k))
        q_turned, k_turned = (x.array for x in turned)
        return q_turned @ k_turned.T

    np.testing.assert_allclose(products(0), products(40), atol=2e-5)


def test_lengths_are_kept_and_position_zero_is_not_turned():
    x = hax.random.normal(jr.key(0), (Pos, HeadDim))
    turned = rotary(x, hax.arange(Pos), HeadDim)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned.array, axis=-1), jnp.linalg.norm(x.array, axis=-1), rtol=1e-6
    )
    np.testing.assert_array_equal(turned.array[0], x.array[0])


def test_axes_may_come_in_any_order_and_positions_may_differ_by_sequence():
    Batch = Axis("batch", 3)
    x = hax.random.normal(jr.key(0), (HeadDim, Batch, Heads, Pos))
    positions = hax.random.randint(jr.key(1), (Batch, Pos), 0, 50)
    turned = rotary(x, positions, HeadDim)
    assert turned.axes == x.axes
    for b in range(3):
        one = rotary(x["batch", b], positions["batch", b], HeadDim)
        np.testing.assert_allclose(turned["batch", b].array, one.array, atol=1e-6)


def test_bfloat16_is_turned_in_float32_and_rounded_once():
    x = hax.random.normal(jr.key(0), (Pos, HeadDim)).astype(jnp.bfloat16)
    turned = rotary(x, hax.arange(Pos), HeadDim)
    exact = rotary(x.astype(jnp.float32), hax.arange(Pos), HeadDim)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned.array, exact.array.astype(jnp.bfloat16))


def test_wrong_axes_raise_by_name():
    x = hax.zeros((Pos, HeadDim))
    with pytest.raises(ValueError, match="needs axis 'features'"):
        apply_rotary(x, hax.arange(Pos), "features")
    with pytest.raises(ValueError, match="needs axis 'batch'"):
        apply_rotary(x, hax.arange(Axis("batch", 2)), HeadDim)
    with pytest.raises(ValueError, match="has 7 features, but must be even"):
        apply_rotary(hax.zeros((Pos, Axis("head_dim", 7))), hax.arange(Pos), "head_dim")
    with pytest.raises(TypeError, match="positions must be a haliax.NamedArray"):
        apply_rotary(x, jnp.arange(5), HeadDim)
