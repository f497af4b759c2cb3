import functools as ft

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackax.mamba2 import causal_conv, causal_conv_step
from tests.reference import ssd as reference

T, CHANNELS = 8, 3


def silu(x):
    return x / (1 + np.exp(-x))


def inputs(k, seed=0):
    rng = np.random.default_rng([seed, k])
    shapes = dict(x=(T, CHANNELS), weight=(k, CHANNELS), bias=(CHANNELS,), window=(k - 1, CHANNELS))
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


@ft.cache
def compiled(activation):
    def run(x, weight, bias, window, mask, ids, previous):
        return causal_conv(
            x, weight, bias, initial_window=window, mask=mask, segment_ids=ids,
            previous_segment_id=previous, activation=activation,
        )  # fmt: skip

    return jax.jit(run)


@hypothesis.settings(deadline=None, max_examples=150, derandomize=True)
@hypothesis.given(
    k=st.sampled_from([1, 2, 4]),
    length=st.integers(0, T),
    left=st.integers(0, T),
    seed=st.integers(0, 1000),
    is_continued=st.booleans(),
)
def test_it_equals_a_loop_over_real_tokens(k, length, left, seed, is_continued):
    rng, left = np.random.default_rng(seed), min(left, T - length)
    args = inputs(k, seed)
    real = np.zeros(T, bool)
    real[left : left + length] = True
    ids = np.cumsum(rng.uniform(size=T) < 0.3)
    previous = ids[left] if is_continued and length else np.int64(77)
    with jax.enable_x64(True):
        y, window = compiled("silu")(**args, mask=real, ids=ids, previous=previous)
        y_, window_ = reference.conv(
            args["x"][real], args["weight"], args["bias"], window=args["window"], ids=ids[real],
            previous=previous,
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(y)[real], silu(y_), rtol=0, atol=1e-12)
        np.testing.assert_allclose(window, window_, rtol=0, atol=0)


@pytest.mark.parametrize("k", [1, 4])
def test_without_flags_it_is_the_same_and_steps_equal_it(k):
    args = inputs(k)
    with jax.enable_x64(True):
        x, weight, bias, window = args.values()
        y, end = jax.jit(lambda *a: causal_conv(*a[:3], initial_window=a[3]))(
            x, weight, bias, window
        )
        ids = np.zeros(T, int)
        expected = reference.conv(x, weight, bias, window=window, ids=ids)
        np.testing.assert_allclose(y, silu(expected[0]), rtol=0, atol=1e-12)
        np.testing.assert_array_equal(end, expected[1])
        step = jax.jit(causal_conv_step)
        for t in range(T):
            out, window = step(x[t], window, weight, bias)
            np.testing.assert_allclose(out, y[t], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(window, end)


def loss_by_taps(x, weight, bias, window, mask, resets):
    """Written out tap by tap for one sequence without padding on the left, for JAX to derive."""
    k = len(weight)
    seen = jnp.concatenate([window, jnp.where(mask[:, None], x, 0)])
    starts = [max([t for t in range(i + 1) if resets[t]], default=-k) for i in range(T)]
    rows = []
    for t in range(T):
        taps = [seen[t + j] * weight[j] for j in range(k) if t - (k - 1 - j) >= starts[t]]
        rows.append(bias + sum(taps))
    return jnp.sum(jnp.sin(jax.nn.silu(jnp.stack(rows))) * mask[:, None])


def test_gradients_are_those_of_the_formula():
    args = inputs(4)
    mask, ids = np.arange(T) < 6, np.array([0, 0, 0, 1, 1, 2, 2, 2])
    resets = reference.find_resets(ids, mask)

    def ours(x, weight, bias, window):
        y, end = causal_conv(x, weight, bias, initial_window=window, mask=mask, segment_ids=ids)
        return jnp.sum(jnp.sin(y) * mask[:, None]) + 0 * jnp.sum(end)

    with jax.enable_x64(True):
        grads = jax.jit(jax.grad(ours, (0, 1, 2, 3)))(*args.values())
        by_taps = ft.partial(loss_by_taps, mask=mask, resets=resets)
        expected = jax.jit(jax.grad(by_taps, (0, 1, 2, 3)))(*args.values())
        for name, grad, want in zip(args, grads, expected, strict=True):
            np.testing.assert_allclose(grad, want, rtol=0, atol=1e-12, err_msg=name)
        tangents = inputs(4, seed=1)
        _, forward = jax.jit(lambda p, t: jax.jvp(ours, p, t))(
            tuple(args.values()), tuple(tangents.values())
        )
        reverse = sum(np.vdot(g, t) for g, t in zip(grads, tangents.values(), strict=True))
        np.testing.assert_allclose(forward, reverse, rtol=1e-12)


def test_batch_axes_and_narrow_inputs_keep_their_kind():
    args = inputs(4)
    x = jnp.asarray(np.stack([args["x"], -args["x"]])[:, None], jnp.bfloat16)
    run = jax.jit(lambda *a: causal_conv(*a))
    y, window = run(x, jnp.float32(args["weight"]), jnp.float32(args["bias"]))
    assert y.shape == x.shape and y.dtype == window.dtype == jnp.bfloat16
    assert window.shape == (2, 1, 3, CHANNELS)
    exact, _ = reference.conv(
        np.float64(x[1, 0]), args["weight"], args["bias"], window=np.zeros((3, CHANNELS)),
        ids=np.zeros(T, int),
    )  # fmt: skip
    np.testing.assert_allclose(np.float64(y[1, 0]), silu(exact), rtol=2**-8, atol=1e-3)


def test_an_idle_row_of_a_step_keeps_its_window():
    args = inputs(4)
    windows = jnp.float32(np.stack([args["window"]] * 2))
    _, after = jax.jit(causal_conv_step)(
        jnp.float32(args["x"][:2]), windows, jnp.float32(args["weight"]),
        mask=np.array([False, True]),
    )  # fmt: skip
    np.testing.assert_array_equal(after[0], windows[0])
    np.testing.assert_array_equal(after[1, -1], jnp.float32(args["x"][1]))


@pytest.mark.parametrize(
    "change, needle",
    [
        (dict(weight=np.ones((4, 5), np.float32)), "weight has shape .* C = 3 as in x"),
        (dict(initial_window=np.ones((4, 3), np.float32)), "window has shape .* needs"),
        (dict(activation="gelu"), "give 'silu' or None"),
        (dict(previous_segment_id=np.int32(1)), "segment_ids is not"),
        (dict(mask=np.ones(7, bool)), "mask has shape .* T = 8 as in x"),
    ],
)
def test_arguments_that_do_not_fit_raise_by_name(change, needle):
    args = dict(x=np.ones((T, CHANNELS), np.float32), weight=np.ones((4, CHANNELS), np.float32))
    with pytest.raises(ValueError, match=needle):
        causal_conv(**(args | change))
