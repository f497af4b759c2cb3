"""Generation of batches: prompts of unequal lengths, and sequences that stop by themselves.

For both families, where both can do it.
"""

import dataclasses
import functools as ft
import re

import equinox as eqx
import haliax as hax
import jax
import jax.random as jr
import numpy as np
import pytest

from stackax.lm import Decoder, generate
from stackax.lm._generate import _generate
from stackax.mamba2 import Mamba2Config
from tests.reference.weights import draw_like

CONFIG = Mamba2Config(
    layers=2, width=16, head_dim=8, state=4, groups=2, vocab_size=30, vocab_rows=32, chunk_size=4
)
AXES = ("batch", "position")
LENGTHS = (1, 4, 5)
NEW = 7


@pytest.fixture(scope="module")
def mamba():
    """A model with a wide spread of logits, or greedy choices would be close calls."""
    return draw_like(ft.partial(Decoder.init, CONFIG, key=jr.key(0)), embedding=3)


def prompts():
    return np.random.default_rng(0).integers(1, 30, (len(LENGTHS), max(LENGTHS)))


def greedy(model, rows, **how):
    """The tokens that are added to each row."""
    text = generate(model, hax.named(rows, AXES), new_tokens=NEW, temperature=0.0, **how)
    assert text.shape == {"batch": len(rows), "position": rows.shape[1] + NEW}
    np.testing.assert_array_equal(text.array[:, : rows.shape[1]], rows)
    return np.asarray(text.array)[:, rows.shape[1] :]


def continued_alone(model, call):
    """Each prompt continued by a loop of calls on the whole text so far, without a cache."""
    size = max(LENGTHS) + NEW if model.config.seq_len > 20 else model.config.seq_len
    texts = []
    for row, length in zip(prompts(), LENGTHS, strict=True):
        text = row[:length].tolist()
        for _ in range(NEW):
            window = text[-size:]
            padded = np.array([window + [0] * (size - len(window))])
            logits = call(model, hax.named(padded, AXES)).array[0, len(window) - 1]
            text.append(int(np.argmax(logits)))
        texts.append(text[length:])
    return np.array(texts)


@pytest.fixture(scope="module")
def mamba_alone(mamba, logits_of):
    return continued_alone(mamba, logits_of)


@pytest.fixture(params=["mamba2", "transformer"])
def model_and_alone(request, mamba, decoder, logits_of):
    if request.param == "mamba2":
        return mamba, request.getfixturevalue("mamba_alone")
    return decoder, continued_alone(decoder, logits_of)


def padded(side):
    """The prompts in rows of 7 positions, with noise where they are padded."""
    rows = np.random.default_rng(1).integers(0, 30, (len(LENGTHS), 7))
    mask = np.zeros(rows.shape, bool)
    for i, (row, length) in enumerate(zip(prompts(), LENGTHS, strict=True)):
        start = {"left": 7 - length, "right": 0, "both": 1}[side]
        rows[i, start : start + length] = row[:length]
        mask[i, start : start + length] = True
    return rows, hax.named(mask, AXES)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_prompts_are_continued_as_each_would_be_alone(model_and_alone, side):
    model, expected = model_and_alone
    rows, mask = padded(side)
    never = next(token for token in range(30) if token not in expected)
    np.testing.assert_array_equal(greedy(model, rows, mask=mask, stop=never), expected)


def test_a_sequence_that_stopped_repeats_its_stop_and_the_others_go_on(model_and_alone):
    model, expected = model_and_alone
    rows, mask = padded("left")
    stop = int(expected[1, 2])
    ours = greedy(model, rows, mask=mask, stop=stop)
    for row, text in zip(ours, expected, strict=True):
        ends = np.flatnonzero(text == stop)
        end = ends[0] if len(ends) else NEW
        np.testing.assert_array_equal(row[: end + 1], text[: end + 1])
        assert (row[end:] == stop).all() or end == NEW
    assert (ours[1, 2:] == stop).all() and len(set(expected[:, -1])) > 1


def test_the_loop_ends_when_all_have_stopped(mamba, mamba_alone, monkeypatch):
    rows, steps, step = prompts()[:1, :1], [], Decoder.step

    def counted_step(self, *args):
        jax.debug.callback(lambda: steps.append(1))
        return step(self, *args)

    monkeypatch.setattr(Decoder, "step", counted_step)
    first = int(mamba_alone[0, 0])
    assert (greedy(mamba, rows, stop=[first, 29]) == first).all()
    jax.effects_barrier()
    assert not steps, "the first new token needs no step"


def test_a_prompt_read_in_pieces_is_continued_as_one_read_at_once(mamba, mamba_alone):
    """In 3 pieces, the last of them filled up; a short prompt lies in one, a long one in 2."""
    rows, mask = padded("both")
    np.testing.assert_array_equal(greedy(mamba, rows, mask=mask, prefill_size=3), mamba_alone)


def test_pieces_of_whole_prompts_need_no_mask(mamba, mamba_alone):
    row = prompts()[1:2, : LENGTHS[1]]
    np.testing.assert_array_equal(greedy(mamba, row, prefill_size=2), mamba_alone[1:2])


def test_a_key_decides_the_text_of_a_mamba2(mamba):
    prompt = hax.named(np.array([1]), "position")
    texts = [
        generate(mamba, prompt, new_tokens=9, top_k=5, key=jr.key(seed)).array.tolist()
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert max(texts[0]) < 30


def test_the_compiled_loop_holds_one_cache_and_copies_none():
    """Its scratch memory is one cache, and less than three layers' parts of one beside it.

    A cache of 64 sequences outweighs a layer's weights and features by far. A copy of it would
    show in the bytes, and as an operation in the program.
    """
    config = dataclasses.replace(CONFIG, layers=8, state=64)
    model = draw_like(ft.partial(Decoder.init, config, key=jr.key(0)))
    rows = hax.named(np.ones((64, 1), np.int32), AXES)
    lowered = _generate.lower(
        model, rows, None, np.zeros(0, np.int32), None, (NEW, 0.0, None, None)
    )
    compiled = lowered.compile().compiled
    cache = eqx.filter_eval_shape(model.init_cache, [hax.Axis("batch", 64)])
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    beside = compiled.memory_analysis().temp_size_in_bytes - cache_bytes
    assert 0 < beside < 3 * cache_bytes / 8
    assert not re.findall(r"= f32\[8,64,4,8,64\]\S* copy\(", compiled.as_text())


@pytest.mark.parametrize(
    "how, error, needle",
    [
        (dict(mask=np.zeros((3, 7), bool)), ValueError, "at least one"),
        (dict(mask=np.tile([True, False], (3, 4))[:, :7]), ValueError, "one run of positions"),
        (dict(mask=np.ones((3, 7), int)), TypeError, "mask must hold bools, not int"),
        (dict(mask=np.ones((3, 6), bool)), ValueError, "'position' must have size 7"),
        (dict(stop=30), ValueError, "stop=30 must be a token, from 0 to 29"),
        (dict(stop=[1, -1]), ValueError, "stop=-1 must be a token"),
        (dict(prefill_size=0), ValueError, "prefill_size=0 must be at least 1"),
    ],
)
def test_choices_that_cannot_be_meant_raise(mamba, how, error, needle):
    how = {k: hax.named(v, AXES) if isinstance(v, np.ndarray) else v for k, v in how.items()}
    with pytest.raises(error, match=needle):
        greedy(mamba, padded("left")[0], **how)


def test_a_mask_for_a_batch_that_is_not_there_raises(mamba):
    mask = hax.ones({"batch": 2, "position": 3}, dtype=bool)
    with pytest.raises(ValueError, match=r"mask has the axes \['batch'\], which prompt has not"):
        generate(mamba, hax.named([1, 2, 3], "position"), mask=mask, new_tokens=1)


def test_a_transformer_reads_no_prompt_in_pieces(decoder):
    with pytest.raises(TypeError, match="prefill_size is given, but a transformer has no cache"):
        generate(decoder, hax.named([1], "position"), new_tokens=1, prefill_size=1)
