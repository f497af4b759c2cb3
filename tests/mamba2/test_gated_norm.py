import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackax.mamba2 import gated_rms_norm
from tests.reference import ssd as reference


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_it_agrees_with_float64_numpy(groups, norm_before_gate):
    y, gate = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
    weight = np.linspace(0.5, 2, 16, dtype=np.float32)
    options = dict(groups=groups, eps=1e-5, norm_before_gate=norm_before_gate)
    ours = jax.jit(ft.partial(gated_rms_norm, **options))(y, gate, weight)
    exact = reference.gated_rms_norm(*(np.float64(x) for x in (y, gate, weight)), **options)
    np.testing.assert_allclose(ours, exact, atol=2e-6)


def test_groups_of_a_narrow_array_are_normalised_apart_and_in_float32():
    # In bfloat16 the sum of 2048 squares would stop growing at 256.
    y = jnp.concatenate([jnp.full(2048, 3.0), jnp.full(2048, 1e-2)]).astype(jnp.bfloat16)
    out = gated_rms_norm(y, jnp.full_like(y, 20), jnp.ones(4096), groups=2, eps=0.0)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(out), 1.0, rtol=2**-8)


@pytest.mark.parametrize(
    "change, needle",
    [
        (dict(groups=3), "groups=3 does not divide the 8 channels"),
        (dict(gate=np.ones(4, np.float32)), "gate has shape"),
    ],
)
def test_arguments_that_do_not_fit_raise_by_name(change, needle):
    args = {name: np.ones(8, np.float32) for name in ("y", "gate", "weight")}
    with pytest.raises(ValueError, match=needle):
        gated_rms_norm(**({"groups": 1, "eps": 1e-5} | args | change))
