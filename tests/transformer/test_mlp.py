import haliax as hax
import jax.random as jr
import numpy as np
import pytest

from stackax.transformer import swiglu
from tests.reference import transformer as reference

Mlp = hax.Axis("mlp", 9)


def test_swiglu_agrees_with_float64_numpy():
    gate, up = (hax.random.normal(jr.key(i), Mlp) * 5 for i in (0, 1))
    expected = reference.swiglu(gate.array, up.array)
    np.testing.assert_allclose(swiglu(gate, up).array, expected, rtol=1e-6, atol=1e-6)


def test_swiglu_refuses_axes_that_would_broadcast():
    with pytest.raises(ValueError, match="needs axis 'mlp' of size 9"):
        swiglu(hax.zeros(Mlp), hax.zeros(()))
    with pytest.raises(ValueError, match="needs axis 'batch' of size 2"):
        swiglu(hax.zeros(Mlp), hax.zeros({"mlp": 9, "batch": 2}))
