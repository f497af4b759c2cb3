"""The assertions pass on what is so, and fail on each thing that isn't, with the bill."""

import jax
import jax.numpy as jnp
import pytest
from haliax import Axis

from stackax import ScanCheckpointPolicy, checkpoint_name, fold
from stackax.testing import assert_recomputes, assert_saves

N, WEIGHTS, X = 4, jnp.ones((4, 8, 8)), jnp.ones((2, 8))
SIZE = N * X.nbytes
LAYERS = Axis("layers", N)


def layers(remat):
    def layer(x, w):
        hidden = jnp.sin(checkpoint_name(x @ w, "hidden"))
        return x + checkpoint_name(hidden, "sine") ** 2

    return lambda weights, x: fold(layer, LAYERS, remat=remat)(x, weights)


HIDDEN = layers(ScanCheckpointPolicy(save_block_internals=["hidden"]))
BOTH = layers(ScanCheckpointPolicy(save_block_internals=["hidden", "sine"]))


def test_what_is_kept_passes():
    assert_saves(HIDDEN, WEIGHTS, X, {"hidden": SIZE}, max_bytes=2 * SIZE)
    assert_saves(HIDDEN, WEIGHTS, X, {"hidden": None})
    assert_saves(BOTH, WEIGHTS, X, {"hidden": f"{SIZE} B", "sine": SIZE})
    assert_saves(layers(True), WEIGHTS, X, {}, max_bytes=SIZE)


FAILURES = {
    "another number": (HIDDEN, {"hidden": SIZE + 1}, {}, f"'hidden' takes {SIZE} bytes, not"),
    "not kept": (layers(True), {"hidden": SIZE}, {}, "'hidden' is not kept.*computed again"),
    "kept too": (BOTH, {"hidden": SIZE}, {}, "'sine' is kept"),
    "no such name": (HIDDEN, {"hiden": 1, "hidden": None}, {}, "no value has that name"),
    "too much": (HIDDEN, {"hidden": None}, {"max_bytes": SIZE}, "more than max_bytes"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_is_not_so_fails_with_the_bill(name):
    f, expected, options, message = FAILURES[name]
    with pytest.raises(AssertionError, match=f"(?s){message}.*What the backward pass keeps"):
        assert_saves(f, WEIGHTS, X, expected, **options)


def test_what_is_computed_again_passes():
    assert_recomputes(layers(True), WEIGHTS, X, ["hidden", "sine"], max_forward_evaluations=2.1)
    assert_recomputes(HIDDEN, WEIGHTS, X, "sine")


def test_what_is_kept_or_too_dear_fails():
    with pytest.raises(AssertionError, match="'hidden' is not computed again: it is kept"):
        assert_recomputes(HIDDEN, WEIGHTS, X, ["hidden"])
    with pytest.raises(AssertionError, match="the forward pass runs"):
        assert_recomputes(
            layers(ScanCheckpointPolicy(slots=1)), WEIGHTS, X, [], max_forward_evaluations=2
        )


def test_a_forgotten_expectation_is_named():
    with pytest.raises(TypeError, match="takes the names to be kept last"):
        assert_saves(HIDDEN, WEIGHTS, X)
    with pytest.raises(TypeError, match="takes the names last"):
        assert_recomputes(HIDDEN, WEIGHTS, X)


def test_any_function_of_jax_can_be_asserted_on():
    def f(x):
        return jnp.sin(checkpoint_name(jnp.exp(x), "exp")).sum()

    assert_saves(f, X, {})  # without remat, the derivatives' own values are kept
    assert_recomputes(jax.checkpoint(f), X, ["exp"])
