import functools as ft

import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax.lm import Decoder, cross_entropy, next_token_loss
from stackax.transformer import TransformerConfig

rng = np.random.default_rng(0)
Pos, Vocab = hax.make_axes(position=5, vocab=7)
LOGITS = hax.named(jnp.asarray(rng.normal(size=(7, 5)) * 9, jnp.float32), (Vocab, Pos))
TARGETS = hax.named(jnp.asarray(rng.integers(0, 7, 5)), Pos)


def test_cross_entropy_agrees_with_float64_numpy():
    logits, targets = np.asarray(LOGITS.array, dtype=np.float64).T, np.asarray(TARGETS.array)
    expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(5), targets]
    np.testing.assert_allclose(cross_entropy(LOGITS, TARGETS, Vocab).array, expected, rtol=1e-6)


def test_cross_entropy_of_bfloat16_logits_is_summed_in_float32():
    half = LOGITS.astype(jnp.bfloat16)
    ours = cross_entropy(half, TARGETS, Vocab)
    assert ours.dtype == jnp.float32
    exact = cross_entropy(half.astype(jnp.float32), TARGETS, Vocab)
    np.testing.assert_array_equal(ours.array, exact.array)


@pytest.mark.parametrize(
    "wrong, error, needle",
    [
        (lambda x, t: (x, t.astype(float)), TypeError, "targets must be integers"),
        (lambda x, t: (x.rename({"vocab": "v"}), t), ValueError, "needs axis 'vocab'"),
        (lambda x, t: (x, t["position", 0]), ValueError, "targets .* needs axis 'position'"),
        (lambda x, t: (x, t["position", :3]), ValueError, "'position' must have size 3"),
    ],
)
def test_cross_entropy_refuses_axes_that_do_not_fit(wrong, error, needle):
    with pytest.raises(error, match=needle):
        cross_entropy(*wrong(LOGITS, TARGETS), "vocab")


def test_the_loss_is_the_mean_over_each_next_token(decoder, windows, logits_of, loss_and_gradient):
    logits = np.asarray(logits_of(decoder, windows["position", :8]).array, dtype=np.float64)
    targets = np.asarray(windows.array)[:, 1:, None]
    chosen = np.take_along_axis(logits, targets, axis=-1)[..., 0]
    expected = (np.log(np.exp(logits).sum(-1)) - chosen).mean()
    np.testing.assert_allclose(loss_and_gradient(decoder, windows)[0], expected, rtol=1e-5)


def test_a_chunked_loss_has_the_same_value_and_gradient(decoder, windows, loss_and_gradient):
    whole = loss_and_gradient(decoder, windows)
    ours = loss_and_gradient(decoder, windows, 2)
    np.testing.assert_allclose(ours[0], whole[0], rtol=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (ours, whole)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max() + 1e-8)


def test_a_chunked_loss_keeps_the_logits_of_one_chunk_only():
    # Logits that outweigh everything else: 256 positions of 4096 tokens, in a model of width 4.
    config = TransformerConfig(layers=1, width=4, heads=1, vocab_size=4096, seq_len=256)
    make = ft.partial(Decoder.init, config, key=jr.key(0))
    decoder = jax.eval_shape(make)
    tokens = hax.zeros({"position": 257}, dtype=jnp.int32)

    gradient = jax.jit(jax.grad(ft.partial(next_token_loss, chunk=16)))
    temp_bytes = gradient.lower(decoder, tokens).compile().memory_analysis().temp_size_in_bytes
    all_logits_bytes = 4 * 256 * 4096
    assert temp_bytes < all_logits_bytes / 2


@pytest.mark.parametrize("chunk", [0, 3, 9])
def test_a_chunk_that_does_not_divide_raises(decoder, windows, chunk):
    with pytest.raises(ValueError, match=f"chunk={chunk} must divide the 8 positions"):
        next_token_loss(decoder, windows, chunk=chunk)


def test_one_token_has_no_next_one(decoder, windows):
    with pytest.raises(ValueError, match="needs at least 2"):
        next_token_loss(decoder, windows["position", :1])
