"""A Mamba-2 as a language model: however a text is cut up, padded or packed, its logits are one.

The text has 9 tokens and chunks of 4, so that it crosses chunks and does not fill them. All ways
of cutting it up are rows of one batch, so that each is one program.
"""

import dataclasses
import functools as ft

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax import BlockSeq, Stacked
from stackax.lm import (
    Decoder,
    TrainingConfig,
    TrainState,
    load_state,
    next_token_loss,
    save_state,
)
from stackax.mamba2 import Mamba2Block, Mamba2Config
from stackax.transformer import TransformerBlock, TransformerConfig
from tests.reference import mamba2 as reference
from tests.reference import transformer as transformers
from tests.reference.weights import draw_like

CONFIG = Mamba2Config(
    layers=2,
    width=16,
    head_dim=8,
    state=4,
    groups=2,
    vocab_size=30,
    vocab_rows=32,
    dt_limit=(0.05, 1.0),
    chunk_size=4,
)
TEXT = np.random.default_rng(0).integers(0, 30, 9)
T = len(TEXT)
# What one pass and pieces may differ by, in logits of about 3: rounding, and the order of sums.
TOLERANCES = {"float64": 1e-10, "float32": 5e-6}


def forward(decoder, tokens, **more):
    return np.asarray(_forward(decoder, tokens, **more).array)


def prefill(decoder, tokens, cache, **more):
    logits, cache = _prefill(decoder, tokens, cache, **more)
    return np.asarray(logits.array), cache


def step(decoder, tokens, cache):
    logits, cache = _step(decoder, tokens, cache)
    return np.asarray(logits.array), cache


# A program runs once or a few times here: the time to compile it is what counts.
_jit = ft.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
_forward = _jit(lambda decoder, tokens, **more: decoder(tokens, **more))


@_jit
def _prefill(decoder, tokens, cache, **more):
    hidden, cache = decoder.prefill(tokens, cache, **more)
    return decoder.unembed(hidden), cache


@_jit
def _step(decoder, tokens, cache):
    hidden, cache = decoder.step(tokens, cache)
    return decoder.unembed(hidden), cache


def named(rows):
    rows = np.asarray(rows)
    return hax.named(rows, ("batch", "position")[-rows.ndim :])


def batch_of(count):
    return [hax.Axis("batch", count)]


def close(ours, expected, tolerance):
    np.testing.assert_allclose(np.asarray(ours, np.float64), expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def mamba():
    return draw_like(ft.partial(Decoder.init, CONFIG, key=jr.key(0)))


def in_dtype(mamba, dtype):
    """The model in a dtype, the logits of the text in one pass, and what may differ."""
    with jax.enable_x64(dtype == "float64"):
        decoder = dataclasses.replace(mamba, dtype=jnp.dtype(dtype))
        logits = forward(decoder, named(TEXT))
        assert logits.shape == (T, 30)
        yield decoder, logits, TOLERANCES[dtype]


@pytest.fixture(params=TOLERANCES)
def in_each_dtype(request, mamba):
    yield from in_dtype(mamba, request.param)


@pytest.fixture
def exact(mamba):
    yield from in_dtype(mamba, "float64")


def test_logits_agree_with_float64_numpy_token_by_token(in_each_dtype):
    decoder, logits, tolerance = in_each_dtype
    close(logits, reference.logits(decoder, TEXT), tolerance)


def test_steps_after_a_prefill_give_one_pass_wherever_it_ends(in_each_dtype):
    """Row s reads s tokens at once and the rest one by one: a batch of unequal lengths."""
    decoder, expected, tolerance = in_each_dtype
    lengths = np.arange(T + 1)
    mask = named(np.arange(T) < lengths[:, None])
    logits, cache = prefill(
        decoder, named([TEXT] * (T + 1)), decoder.init_cache(batch_of(T + 1)), mask=mask
    )
    for row in lengths:
        close(logits[row, :row], expected[:row], tolerance)
    for count in range(T):
        at = np.minimum(lengths + count, T - 1)
        logits, cache = step(decoder, hax.named(TEXT[at], "batch"), cache)
        for row in lengths[lengths + count < T]:
            close(logits[row], expected[row + count], tolerance)


@pytest.mark.parametrize("pieces", [(1,) * 9, (2, 1, 4, 2), (4, 4, 1)], ids=str)
def test_a_text_in_pieces_gives_one_pass(exact, pieces):
    """The convolution sees 4 tokens, so that most pieces are shorter than what it remembers."""
    decoder, expected, tolerance = exact
    cache, start = decoder.init_cache(), 0
    for size in pieces:
        logits, cache = prefill(decoder, named(TEXT[start : start + size]), cache)
        close(logits, expected[start : start + size], tolerance)
        start += size


def padded_rows():
    """Every length of the text with up to 4 tokens of padding on its left, in 13 positions."""
    rows = [(left, length) for left in range(5) for length in range(1, T + 1)]
    tokens = np.random.default_rng(1).integers(0, 30, (len(rows), T + 4))
    mask = np.zeros(tokens.shape, bool)
    for row, (left, length) in enumerate(rows):
        tokens[row, left : left + length] = TEXT[:length]
        mask[row, left : left + length] = True
    return rows, named(tokens), named(mask)


def test_padding_on_either_side_changes_no_logits_and_no_cache(exact):
    decoder, expected, tolerance = exact
    rows, tokens, mask = padded_rows()
    logits, cache = prefill(decoder, tokens, decoder.init_cache(batch_of(len(rows))), mask=mask)
    # Row n of the other batch has read n tokens of the text, with padding on its right alone.
    prefixes = named(np.arange(T) < np.arange(T + 1)[:, None])
    unpadded = decoder.init_cache(batch_of(T + 1))
    _, unpadded = prefill(decoder, named([TEXT] * (T + 1)), unpadded, mask=prefixes)
    caches = [[np.asarray(leaf) for leaf in jax.tree.leaves(each)] for each in (cache, unpadded)]
    for row, (left, length) in enumerate(rows):
        close(logits[row, left : left + length], expected[:length], tolerance)
        for ours, theirs in zip(*caches, strict=True):
            close(ours[:, row], theirs[:, length], tolerance)


def test_padding_changes_no_logits_without_a_cache(exact):
    decoder, expected, tolerance = exact
    rows, tokens, mask = padded_rows()
    logits = forward(decoder, tokens, mask=mask)
    for row, (left, length) in enumerate(rows):
        close(logits[row, left : left + length], expected[:length], tolerance)


DOCUMENTS = np.array([7, 7, 7, 2, 2, 2, 2, 5, 7])


def test_packed_documents_do_not_see_each_other_in_one_pass_or_in_pieces(exact):
    """Cut inside a document, between two, and with padding that has any id."""
    decoder, _, tolerance = exact
    expected = reference.logits(decoder, TEXT, DOCUMENTS)
    ends = np.flatnonzero(np.diff(DOCUMENTS, append=-1)) + 1
    for start, end in zip([0, *ends], ends, strict=False):
        close(expected[start:end], reference.logits(decoder, TEXT[start:end]), 1e-12)
    whole = forward(decoder, named(TEXT), segment_ids=named(DOCUMENTS))
    close(whole, expected, tolerance)
    for cut in (2, 3, 7):
        # Each part is padded to the same size, the first at its end and the second at its start.
        parts, cache = [], decoder.init_cache()
        for part, where in ((slice(cut), slice(cut)), (slice(cut, T), slice(cut, T))):
            tokens, ids, mask = np.zeros(T, int), np.full(T, 3), np.zeros(T, bool)
            tokens[where], ids[where], mask[where] = TEXT[part], DOCUMENTS[part], True
            more = {"mask": named(mask), "segment_ids": named(ids)}
            logits, cache = prefill(decoder, named(tokens), cache, **more)
            parts.append(logits[where])
        close(np.concatenate(parts), expected, tolerance)


def test_a_step_goes_on_in_the_last_document(exact):
    decoder, _, tolerance = exact
    _, cache = prefill(
        decoder, named(TEXT[:8]), decoder.init_cache(), segment_ids=named(DOCUMENTS[:8])
    )
    logits, _ = step(decoder, hax.named(TEXT[8], ()), cache)
    close(logits, reference.logits(decoder, TEXT[7:])[-1], tolerance)


def test_the_cache_keeps_its_dtypes_and_its_size(mamba):
    half = dataclasses.replace(mamba, dtype=jnp.dtype("bfloat16"))
    empty = half.init_cache(batch_of(3))
    dtypes = {"state": jnp.float32, "window": jnp.bfloat16, "segment_id": jnp.int32}
    for size in (1, 1000):
        tokens = hax.zeros({"batch": 3, "position": size}, dtype=int)
        hidden, cache = eqx.filter_eval_shape(half.prefill, tokens, empty)
        assert hidden.dtype == jnp.bfloat16
        for name, dtype in dtypes.items():
            ours, first = getattr(cache, name), getattr(empty, name)
            assert ours.dtype == dtype and ours.axes == first.axes
    assert {a.name: a.size for a in empty.state.axes} == {
        "layers": 2,
        "batch": 3,
        "heads": 4,
        "head_dim": 8,
        "state": 4,
    }


def test_bfloat16_is_near_float32_and_the_stream_may_stay_in_float32(mamba):
    config = dataclasses.replace(CONFIG, residual_dtype="float32")
    make = ft.partial(Decoder.init, key=jr.key(0), dtype="bfloat16")
    narrow, wide = (draw_like(ft.partial(make, each)) for each in (CONFIG, config))
    tokens = named(TEXT)
    assert eqx.filter_eval_shape(narrow.hidden, tokens).dtype == jnp.bfloat16
    assert eqx.filter_eval_shape(wide.hidden, tokens).dtype == jnp.float32
    jaxpr = str(eqx.filter_make_jaxpr(wide.hidden)(tokens)[0])
    assert "bf16[9,84]" in jaxpr, "the projection is computed in bfloat16 all the same"
    ours = forward(narrow, tokens).astype(np.float64)
    # Eight bits through two layers, on logits of about three.
    np.testing.assert_allclose(ours, reference.logits(mamba, TEXT), atol=0.15)


def test_logits_of_padding_rows_do_not_exist_and_have_no_gradient(mamba):
    tokens = named(TEXT)
    gradient = _jit(jax.grad(next_token_loss))(mamba, tokens)
    table = np.asarray(gradient.embedding.weight.array)
    assert table.shape == (32, 16)
    assert np.abs(table[:30]).min(0).max() > 0 and (table[30:] == 0).all()


def test_a_state_of_training_is_saved_and_loaded_with_its_family(tmp_path):
    training = TrainingConfig(steps=12, batch=4, learning_rate=2e-2, dtype="bfloat16")
    state = draw_like(ft.partial(TrainState.init, CONFIG, training))
    save_state(tmp_path, state, training)
    loaded, _ = load_state(tmp_path)
    assert loaded.decoder.config == CONFIG and loaded.decoder.dtype == jnp.bfloat16
    weights = (each.decoder.stack.stacked.mixer.A_log.array for each in (loaded, state))
    np.testing.assert_array_equal(*weights)


PAIR = hax.Axis("layers", 2)


class Pair(eqx.Module):
    """A Mamba-2 block, then a transformer's: one block of a hybrid stack."""

    mamba: Mamba2Block
    attention: TransformerBlock

    @staticmethod
    def init(mamba, transformer, *, key):
        keys = jr.split(key)
        return Pair(
            Mamba2Block.init(mamba, key=keys[0]),
            TransformerBlock.init(transformer, key=keys[1]),
        )

    def __call__(self, x):
        return self.attention(self.mamba(x))


def test_mamba_blocks_mix_with_transformer_blocks():
    transformer = TransformerConfig(layers=2, width=16, heads=2, vocab_size=8, seq_len=8)
    make = Stacked.init(PAIR, Pair, gradient_checkpointing="save_out_proj")
    pairs = draw_like(ft.partial(make, CONFIG, transformer, key=jr.key(0)))
    x = np.random.default_rng(0).normal(size=(5, 16))
    stream = hax.named(x.astype(np.float32), ("position", "embed"))
    for stack in (pairs, BlockSeq.from_layers([pairs[0].mamba, pairs[0].attention])):
        expected = x
        for pair in list(pairs)[: len(stack) if isinstance(stack, Stacked) else 1]:
            expected = reference.block(pair.mamba, expected)
            expected = transformers.block(pair.attention, expected, transformer)
        ours = _jit(lambda stack, x: stack.fold(x))(stack, stream)
        assert ours.axes == stream.axes
        np.testing.assert_allclose(ours.array, expected, atol=1e-5)


@pytest.mark.parametrize(
    "call, error, needle",
    [
        (
            lambda d, t: d(t, hax.arange(t.resolve_axis("position"))),
            TypeError,
            "positions is given, but a mamba2 takes only mask and segment_ids",
        ),
        (lambda d, t: d.step(t, d.init_cache()), ValueError, "axis 'position' is made here"),
        (
            lambda d, t: d.prefill(t, d.init_cache(batch_of(2))),
            ValueError,
            "cache.state has the axes",
        ),
        (
            lambda d, t: d(t, mask=hax.ones({"batch": 2, "position": 9}, dtype=bool)),
            ValueError,
            r"mask has the axes \['batch'\], which x has not",
        ),
        (
            lambda d, t: d(t, segment_ids=hax.zeros({"position": 8}, dtype=int)),
            ValueError,
            "segment_ids has the axes .* must have size 9",
        ),
    ],
)
def test_arguments_that_do_not_fit_raise_by_name(mamba, call, error, needle):
    with pytest.raises(error, match=needle):
        eqx.filter_eval_shape(call, mamba, named(TEXT))


def test_a_transformer_has_no_cache_and_no_mask(decoder):
    tokens = hax.zeros({"position": 4}, dtype=int)
    with pytest.raises(TypeError, match="a transformer has no cache yet"):
        decoder.init_cache()
    with pytest.raises(TypeError, match="mask is given, but a transformer takes only positions"):
        decoder(tokens, mask=tokens == 0)


def test_a_config_of_no_family_raises():
    with pytest.raises(TypeError, match="config must be a TransformerConfig or a Mamba2Config"):
        Decoder.init("mamba", key=jr.key(0))
