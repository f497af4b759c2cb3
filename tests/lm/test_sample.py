import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax.lm import sample

Draw, Vocab = hax.make_axes(draw=20_000, vocab=5)
LOGITS = np.array([0.0, 2.0, 1.0, -1.0, 1.5], np.float32)
many = hax.named(jnp.broadcast_to(LOGITS, (Draw.size, Vocab.size)), (Draw, Vocab))


def frequencies(**how):
    tokens = sample(many, Vocab, key=jr.key(0), **how)
    assert tokens.axes == (Draw,) and tokens.dtype == jnp.int32
    return np.bincount(tokens.array, minlength=5) / Draw.size


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    # Four standard deviations of a frequency near one half.
    np.testing.assert_allclose(
        frequencies(temperature=temperature), weights / weights.sum(), atol=4 * 0.5 / 141
    )


def test_top_k_never_draws_another_and_keeps_the_odds_among_them():
    ours = frequencies(top_k=2)
    weights = np.exp(LOGITS.astype(np.float64)) * [0, 1, 0, 0, 1]
    assert (ours[[0, 2, 3]] == 0).all()
    np.testing.assert_allclose(ours, weights / weights.sum(), atol=4 * 0.5 / 141)


def test_zero_temperature_takes_the_likeliest_and_the_first_of_equals():
    logits = hax.named([[0.0, 3.0, 3.0], [2.0, 1.0, 0.0]], ("row", "vocab"))
    assert sample(logits, "vocab", temperature=0.0).array.tolist() == [1, 0]


def test_the_vocabulary_may_be_any_axis():
    logits = hax.named(jnp.eye(3) * 9, ("vocab", "row"))
    assert sample(logits, "vocab", temperature=0.0).array.tolist() == [0, 1, 2]


def test_the_same_key_draws_the_same_tokens_also_under_jit():
    eager = sample(many, Vocab, key=jr.key(3), top_k=3).array
    jitted = jax.jit(lambda x, key: sample(x, Vocab, key=key, top_k=3))(many, jr.key(3)).array
    np.testing.assert_array_equal(eager, jitted)


@pytest.mark.parametrize(
    "how, needle",
    [
        (dict(temperature=-1.0), "temperature=-1.0 must be 0 or a positive number"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_k=0), "top_k=0 must be between 1 and 5"),
        (dict(top_k=6), "top_k=6 must be between 1 and 5"),
        (dict(top_k=2, temperature=0.0), "changes nothing"),
        (dict(key=None), "give key="),
    ],
)
def test_a_choice_that_cannot_be_meant_raises(how, needle):
    with pytest.raises(ValueError, match=needle):
        sample(hax.zeros(Vocab), Vocab, **dict(key=jr.key(0)) | how)
