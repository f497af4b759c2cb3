import dataclasses
import functools as ft

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax.lm import Decoder
from tests.reference import transformer as reference


@pytest.fixture(scope="module")
def tokens(windows):
    return windows["position", :8]


def test_logits_agree_with_float64_numpy(decoder, tokens, logits_of):
    config = decoder.config
    table = np.asarray(decoder.embedding.weight.array, dtype=np.float64)
    logits = logits_of(decoder, tokens)
    assert [a.name for a in logits.axes] == ["batch", "position", "vocab"]
    for row, ours in zip(np.asarray(tokens.array), logits.array, strict=True):
        x = table[row]
        for block in decoder.stack.unstacked():
            x = reference.block(block, x, config)
        x = reference.rms_norm(x, np.asarray(decoder.norm.weight.array), config.norm_eps)
        np.testing.assert_allclose(ours, x @ table.T, rtol=1e-4, atol=1e-4)


def test_the_stack_equals_a_plain_loop_over_its_blocks(decoder, tokens, logits_of):
    @eqx.filter_jit
    def loop(decoder, tokens):
        x = decoder.embedding(tokens)
        for block in decoder.stack.unstacked():
            x = block(x)
        return decoder.unembed(decoder.norm(x))

    np.testing.assert_allclose(
        loop(decoder, tokens).array, logits_of(decoder, tokens).array, rtol=1e-5, atol=1e-5
    )


def test_layers_start_different(decoder):
    for leaf in jax.tree.leaves(decoder.stack.stacked.mlp):
        assert np.abs(leaf[0] - leaf[1]).max() > 0


def test_the_embedding_starts_at_the_scale_that_a_tied_head_needs(decoder):
    # 4096 draws know their standard deviation to 1.1 %; this is four times that.
    np.testing.assert_allclose(np.std(decoder.embedding.weight.array), 16**-0.5, rtol=0.045)


def test_a_policy_by_name_leaves_gradients_unchanged(decoder, windows, loss_and_gradient):
    stack = decoder.stack.with_policy("minimal_with_context")
    ours = loss_and_gradient(eqx.tree_at(lambda d: d.stack, decoder, stack), windows)
    plain = loss_and_gradient(decoder, windows)
    for a, b in zip(*map(jax.tree.leaves, (ours, plain)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max() + 1e-7)


def test_a_free_head_has_weights_of_its_own(decoder, tokens):
    config = dataclasses.replace(decoder.config, tied_head=False)
    free = jax.eval_shape(ft.partial(Decoder.init, config, key=jr.key(0)))
    assert decoder.head is None and free.head.weight.shape == {"vocab": 256, "embed": 16}
    weight = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
    head = dataclasses.replace(free.head, weight=hax.named(weight, free.head.weight.axes))
    hidden = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    logits = dataclasses.replace(decoder, head=head).unembed(
        hax.named(hidden, ("position", "embed"))
    )
    np.testing.assert_allclose(logits.array, hidden @ weight.T, atol=1e-5)


def test_bfloat16_is_the_dtype_of_the_stream_and_not_of_weights_or_logits(
    decoder, tokens, logits_of
):
    make = ft.partial(Decoder.init, decoder.config, key=jr.key(0), dtype="bfloat16")
    abstract = jax.eval_shape(make)
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract)} == {jnp.dtype("float32")}
    half = dataclasses.replace(decoder, dtype=abstract.dtype)
    assert jax.eval_shape(half.hidden, tokens).dtype == jnp.bfloat16
    logits = logits_of(half, tokens)
    assert logits.dtype == jnp.float32
    # Eight bits of mantissa through two layers, on logits of about three.
    np.testing.assert_allclose(logits.array, logits_of(decoder, tokens).array, atol=0.3)


@pytest.mark.parametrize(
    "wrong, error, needle",
    [
        (lambda t: t.array, TypeError, "tokens must be a haliax.NamedArray"),
        (lambda t: t.astype(float), TypeError, "tokens must be integers, not float"),
        (lambda t: t.rename({"position": "time"}), ValueError, "needs axis 'position'"),
        (lambda t: t.rename({"batch": "embed"}), ValueError, "axis 'embed' is made here"),
    ],
)
def test_wrong_tokens_raise_by_name(decoder, tokens, wrong, error, needle):
    with pytest.raises(error, match=needle):
        decoder(wrong(tokens))


def test_a_dtype_that_is_not_floating_point_raises(decoder):
    with pytest.raises(ValueError, match="dtype=int32 is not a floating-point type"):
        Decoder.init(decoder.config, key=jr.key(0), dtype=jnp.int32)
