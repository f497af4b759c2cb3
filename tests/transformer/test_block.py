import dataclasses
from collections import Counter

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax.transformer import TransformerBlock, TransformerConfig
from tests.reference import transformer as reference

CONFIG = TransformerConfig(layers=2, width=16, heads=4, kv_heads=2, vocab_size=8, seq_len=6)
Batch = hax.Axis("batch", 2)
call = eqx.filter_jit(lambda block, *args: block(*args))


@pytest.fixture(scope="module")
def block():
    """A block whose norms have weights of their own, or they could be forgotten unseen."""
    block = eqx.filter_jit(TransformerBlock.init)(CONFIG, key=jr.key(0))
    weights = np.random.default_rng(0).normal(1, 0.3, (2, CONFIG.width)).astype(np.float32)
    return eqx.tree_at(
        lambda block: (block.attention_norm.weight.array, block.mlp_norm.weight.array),
        block,
        tuple(jnp.asarray(weights)),
    )


@pytest.fixture(scope="module")
def x():
    return hax.random.normal(jr.key(7), (Batch, CONFIG.Pos, CONFIG.Embed))


def test_it_agrees_with_float64_numpy(block, x):
    out = call(block, x)
    for b in range(2):
        expected = reference.block(block, x.array[b], CONFIG)
        np.testing.assert_allclose(out.array[b], expected, atol=1e-5)


def test_a_change_reaches_only_its_own_position_and_later_ones(block, x):
    changed = hax.named(x.array.at[:, 3].add(1.0), x.axes)
    moved = np.abs(np.asarray(call(block, changed).array - call(block, x).array)).max((0, 2))
    assert (moved[:3] == 0).all() and (moved[3:] > 1e-3).all()


def test_axes_and_their_order_are_those_of_the_input(block, x):
    swapped = x.rearrange(("embed", "position", "batch"))
    out = call(block, swapped)
    assert out.axes == swapped.axes
    np.testing.assert_allclose(out.rearrange(x.axes).array, call(block, x).array, atol=1e-6)


def test_only_differences_of_positions_matter(block, x):
    shifted = call(block, x, hax.arange(CONFIG.Pos) + 30)
    np.testing.assert_allclose(shifted.array, call(block, x).array, atol=1e-5)
    stretched = call(block, x, hax.arange(CONFIG.Pos) * 3)
    assert np.abs(stretched.array - call(block, x).array).max() > 1e-3


def test_one_key_head_for_all_equals_all_heads_with_that_key_head(block, x):
    single, full = (dataclasses.replace(CONFIG, kv_heads=n) for n in (1, None))

    def with_heads(block, config, copies):
        def weight(linear):
            first = np.asarray(linear.weight.array)[:1]
            axes = (config.KVHeads, config.HeadDim, config.Embed)
            return hax.named(jnp.asarray(np.repeat(first, copies, axis=0)), axes)

        attention = block.attention
        projections = (attention.key_proj, attention.value_proj)
        changes = [
            dataclasses.replace(p, weight=weight(p), Out=(config.KVHeads, config.HeadDim))
            for p in projections
        ]
        attention = dataclasses.replace(
            attention, key_proj=changes[0], value_proj=changes[1], config=config
        )
        return dataclasses.replace(block, attention=attention)

    outs = [call(with_heads(block, c, n), x) for c, n in ((single, 1), (full, CONFIG.heads))]
    np.testing.assert_allclose(outs[0].array, outs[1].array, atol=1e-6)


def test_bfloat16_input_is_computed_in_bfloat16_with_float32_weights(block, x):
    half = x.astype(jnp.bfloat16)
    out = call(block, half)
    assert out.dtype == jnp.bfloat16
    difference = np.abs(out.array.astype(jnp.float32) - call(block, x).array)
    # bfloat16 has 8 bits, and values here reach about 4.
    assert difference.max() < 0.1
    halved = jax.tree.map(lambda w: w.astype(jnp.bfloat16), block)
    np.testing.assert_array_equal(out.array, call(halved, half).array)


def kept_shapes(block, x, *names):
    """Shapes of what the backward pass of a checkpointed block is given, when it may keep names."""
    arrays, rest = eqx.partition(block, eqx.is_array)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    call = jax.checkpoint(lambda arrays, x: eqx.combine(arrays, rest)(x), policy=policy)
    pullback = jax.eval_shape(lambda arrays, x: jax.vjp(call, arrays, x)[1], arrays, x)
    return Counter(leaf.shape for leaf in jax.tree.leaves(pullback))


@pytest.mark.parametrize(
    "name, shape",
    [
        ("query_proj", (2, 6, 4, 4)),
        ("key_proj", (2, 6, 2, 4)),
        ("value_proj", (2, 6, 2, 4)),
        ("context", (2, 6, 4, 4)),
        ("out_proj", (2, 6, 16)),
        ("mlpwi_0", (2, 6, 64)),
        ("mlpwi_1", (2, 6, 64)),
    ],
)
def test_a_kept_name_is_one_more_residual_of_its_shape(block, x, name, shape):
    assert kept_shapes(block, x, name) - kept_shapes(block, x) == Counter([shape])


@pytest.mark.parametrize(
    "name, why",
    [
        ("decoder_layer_input", "it takes the place of the layer's input, which is kept anyway"),
        ("mlpwo", "it is only added to the residual stream, which needs no residual"),
    ],
)
def test_a_name_that_adds_no_residual(block, x, name, why):
    assert f"name={name}" in str(jax.make_jaxpr(block)(x))
    assert kept_shapes(block, x, name) == kept_shapes(block, x), why


@pytest.mark.parametrize(
    "wrong, error, needle",
    [
        (lambda x: x.array, TypeError, "x must be a haliax.NamedArray"),
        (lambda x: x.rename({"position": "time"}), ValueError, "needs axis 'position'"),
        (lambda x: x["embed", :8], ValueError, "axis 'embed' must have size 16"),
        (lambda x: x.rename({"batch": "mlp"}), ValueError, "axis 'mlp' is made here"),
    ],
)
def test_a_wrong_residual_stream_raises_by_name(block, x, wrong, error, needle):
    with pytest.raises(error, match=needle):
        jax.eval_shape(block, wrong(x))
