import dataclasses
import functools as ft
import os
from collections import Counter

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackax.mamba2 import Mamba2Block, Mamba2Cache, Mamba2Config
from tests.reference import mamba2 as reference
from tests.reference.weights import draw_like

CONFIG = Mamba2Config(layers=4, width=8, head_dim=4, state=3, groups=2, vocab_size=8, chunk_size=2)
Batch = hax.Axis("batch", 2)
VARIANTS = {
    "as released": CONFIG,
    "one group, norm first, a skip per channel, biases": dataclasses.replace(
        CONFIG, groups=1, norm_before_gate=True, skip="channel", proj_bias=True
    ),
    "no convolution, few heads, limits": dataclasses.replace(
        CONFIG, conv_width=1, conv_bias=False, heads=2, dt_limit=(0.1, 0.8)
    ),
}
# A program runs once or a few times here: the time to compile it is what counts.
_jit = ft.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
call = _jit(lambda block, *args, **more: block(*args, **more))


def drawn(config):
    return draw_like(ft.partial(Mamba2Block.init, config, key=jr.key(0)))


def stream(*shape, seed=1):
    axes = ("batch", "position", "embed")[-len(shape) :]
    return hax.named(np.random.default_rng(seed).normal(size=shape).astype(np.float32), axes)


@pytest.fixture(scope="module")
def block():
    return drawn(CONFIG)


@pytest.fixture(scope="module")
def x():
    return stream(2, 5, 8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_agrees_with_float64_numpy(variant, x):
    block = drawn(VARIANTS[variant])
    out = call(block, x)
    for row, ours in zip(np.asarray(x.array, np.float64), out.array, strict=True):
        np.testing.assert_allclose(ours, reference.block(block, row), atol=1e-5)


def test_axes_and_their_order_are_those_of_the_input(block, x):
    swapped = x.rearrange(("embed", "position", "batch"))
    out = call(block, swapped)
    assert out.axes == swapped.axes
    np.testing.assert_allclose(out.rearrange(x.axes).array, call(block, x).array, atol=1e-6)


def test_the_chunk_size_changes_nothing(block, x):
    config = dataclasses.replace(CONFIG, chunk_size=None)
    whole = eqx.tree_at(lambda b: b.mixer, block, dataclasses.replace(block.mixer, config=config))
    np.testing.assert_allclose(call(whole, x).array, call(block, x).array, atol=1e-6)


def test_the_stream_keeps_its_dtype_where_the_mixer_computes_in_another(block, x):
    half = dataclasses.replace(block, dtype=jnp.dtype("bfloat16"))
    out = eqx.filter_eval_shape(half, x)
    assert out.dtype == jnp.float32
    jaxpr = str(jax.make_jaxpr(half)(x))
    assert "bf16[2,5,48]" in jaxpr, "the projection in is computed in bfloat16"
    inner = eqx.filter_eval_shape(half.mixer, x.astype(jnp.bfloat16))
    assert inner.dtype == jnp.bfloat16


def kept_shapes(block, x, *names):
    """Shapes of what the backward pass of a checkpointed block is given, when it may keep names."""
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    call = jax.checkpoint(lambda block, x: block(x), policy=policy)
    pullback = jax.eval_shape(lambda block, x: jax.vjp(call, block, x)[1], block, x)
    return Counter(leaf.shape for leaf in jax.tree.leaves(pullback))


@pytest.mark.parametrize(
    "name, shape",
    [
        ("in_proj", (2, 5, 48)),
        ("conv", (2, 5, 28)),
        ("ssd", (2, 5, 4, 4)),
        ("gated_norm", (2, 5, 16)),
    ],
)
def test_a_kept_name_is_one_more_residual_of_its_shape(block, x, name, shape):
    assert kept_shapes(block, x, name) - kept_shapes(block, x) == Counter([shape])


@pytest.mark.parametrize("name", ["decoder_layer_input", "out_proj"])
def test_a_name_that_adds_no_residual(block, x, name):
    assert f"name={name}" in str(jax.make_jaxpr(block)(x))
    assert kept_shapes(block, x, name) == kept_shapes(block, x)


def test_first_weights_are_those_of_the_paper():
    """4096 heads know each share of a distribution to 0.8 % of all; this is four times that."""
    config = Mamba2Config(layers=4, width=16, heads=4096, head_dim=1, state=1, vocab_size=8)
    block = _jit(lambda key: Mamba2Block.init(config, key=key))(jr.key(0))
    mixer = block.mixer
    A = np.exp(np.asarray(mixer.A_log.array))
    dt = np.log1p(np.exp(np.asarray(mixer.dt_bias.array, np.float64)))
    assert 1 <= A.min() and A.max() <= 16
    np.testing.assert_allclose(np.mean(A < 4), 3 / 15, atol=0.031)
    assert 0.999e-3 <= dt.min() and dt.max() <= 0.1001
    np.testing.assert_allclose(np.mean(dt < 1e-2), 0.5, atol=0.031)
    for name, bound in {"in_proj": 16**-0.5, "out_proj": 4096**-0.5 * 4**-0.5}.items():
        weight = np.asarray(getattr(mixer, name).weight.array)
        assert 0.99 * bound < np.abs(weight).max() <= bound
        np.testing.assert_allclose(weight.std(), bound * 3**-0.5, rtol=0.02)
    for weight in (mixer.conv_weight, mixer.conv_bias):
        assert 0.49 < np.abs(weight.array).max() <= 0.5
    for ones in (mixer.D, mixer.norm_weight, block.norm.weight):
        assert (np.asarray(ones.array) == 1).all()


def test_step_sizes_start_at_no_less_than_the_floor():
    config = dataclasses.replace(CONFIG, heads=64, dt_range=(1e-6, 1e-5), dt_floor=1e-4)
    block = _jit(lambda key: Mamba2Block.init(config, key=key))(jr.key(0))
    dt = np.log1p(np.exp(np.asarray(block.mixer.dt_bias.array, np.float64)))
    np.testing.assert_allclose(dt, 1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "wrong, error, needle",
    [
        (lambda x: x.array, TypeError, "x must be a haliax.NamedArray"),
        (lambda x: x.rename({"position": "time"}), ValueError, "needs axis 'position'"),
        (lambda x: x["embed", :4], ValueError, "axis 'embed' must have size 8"),
        (lambda x: x.rename({"batch": "inner"}), ValueError, "axis 'inner' is made here"),
    ],
)
def test_a_wrong_residual_stream_raises_by_name(block, x, wrong, error, needle):
    with pytest.raises(error, match=needle):
        jax.eval_shape(block, wrong(x))


# Relative to the largest output: rounding of the residual stream, and the order of sums. In
# bfloat16 a stream of 8 bits is rounded where it is written.
RELATIVE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2**-6}


@st.composite
def cases(draw):
    """A block of any sizes, sequences of any lengths with padding, and where each is cut."""
    groups = draw(st.sampled_from([1, 2, 3]))
    config = Mamba2Config(
        layers=1,
        width=draw(st.integers(1, 5)),
        heads=groups * draw(st.integers(1, 2)),
        head_dim=draw(st.integers(1, 4)),
        state=draw(st.integers(1, 4)),
        groups=groups,
        conv_width=draw(st.integers(1, 5)),
        vocab_size=8,
        norm_before_gate=draw(st.booleans()),
        skip=draw(st.sampled_from(["head", "channel"])),
        proj_bias=draw(st.booleans()),
        conv_bias=draw(st.booleans()),
        dt_limit=draw(st.sampled_from([(0.0, float("inf")), (0.2, 0.9)])),
        chunk_size=draw(st.sampled_from([None, 1, 2, 3])),
    )
    size = draw(st.integers(1, 9))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, size - 1))
        end = draw(st.integers(start + 1, size))
        rows.append((start, draw(st.integers(start, end)), end))
    return config, draw(st.sampled_from(sorted(RELATIVE))), size, np.array(rows)


@_jit
def in_pieces(block, x, mask, cache, cuts):
    """One pass; and a prefill up to the cut of each sequence, then steps, of which row r's i-th is
    at position `cuts[r] + i`.
    """
    before = mask & (hax.arange(x.resolve_axis("position")).broadcast_to(mask.axes) < cuts)
    first, cache = block.prefill(x, cache, before)

    def step(cache, count):
        at = jnp.minimum(cuts.array + count, x.axis_size("position") - 1)
        here = jnp.take_along_axis(x.array, at[:, None, None], 1)[:, 0]
        out, cache = block.step(hax.named(here, ("batch", "embed")), cache)
        return cache, out.array

    steps = jax.lax.scan(step, cache, jnp.arange(x.axis_size("position")))[1]
    return block(x, mask).array, first.array, steps


@settings(
    max_examples=int(os.environ.get("STACKAX_EXAMPLES", "3")), deadline=None, derandomize=True
)
@given(cases())
def test_prefill_and_steps_give_one_pass_whatever_the_shapes(case):
    config, dtype, size, rows = case
    with jax.enable_x64(dtype == "float64"):
        x = stream(len(rows), size, config.width).astype(dtype)
        inside = (rows[:, :1] <= np.arange(size)) & (np.arange(size) < rows[:, 2:])
        mask = hax.named(inside, ("batch", "position"))
        cache = Mamba2Cache.init(config, [x.axes[0]], dtype=dtype)
        whole, first, steps = (
            np.asarray(array, np.float64)
            for array in in_pieces(drawn(config), x, mask, cache, hax.named(rows[:, 1], "batch"))
        )
    tolerance = RELATIVE[dtype] * max(1, np.abs(whole).max())
    for row, (start, cut, end) in enumerate(rows):
        np.testing.assert_allclose(first[row, start:cut], whole[row, start:cut], atol=tolerance)
        np.testing.assert_allclose(
            steps[: end - cut, row], whole[row, cut:end], atol=tolerance, rtol=0
        )
