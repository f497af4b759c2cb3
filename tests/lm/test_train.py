import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackax import ScanCheckpointPolicy
from stackax.lm import (
    TrainingConfig,
    TrainState,
    corpus_of,
    load_state,
    read_about,
    save_checkpoint,
    save_state,
    train,
    train_step,
    training_windows,
    validation_loss,
)
from stackax.transformer import TransformerConfig

MODEL = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)  # conftest's
TRAINING = TrainingConfig(steps=20, batch=4, learning_rate=1e-2)
CORPUS = corpus_of([b"it is a far, far better thing that I do, than I have ever done; " * 20])


def losses_from(state, training=TRAINING):
    losses = []
    for state, loss in train(state, CORPUS, training):
        losses.append(float(loss))
    return losses, state


@pytest.fixture
def fresh():
    return TrainState.init(MODEL, TRAINING)


@pytest.fixture(scope="module")
def straight():
    return losses_from(TrainState.init(MODEL, TRAINING))


def test_losses_fall_on_text_and_on_text_never_seen(straight, fresh):
    losses, state = straight
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    assert validation_loss(state.decoder, CORPUS) < validation_loss(fresh.decoder, CORPUS) - 1


def test_training_that_was_saved_and_loaded_goes_on_bitwise(straight, fresh, tmp_path):
    for state, _ in train(fresh, CORPUS, TRAINING):
        if int(state.step) == 5:
            save_state(tmp_path, state, TRAINING)
            break
    loaded, training = load_state(tmp_path)
    assert training == TRAINING and read_about(tmp_path)["step"] == 5
    losses, state = losses_from(loaded)
    assert losses == straight[0][5:]
    for ours, theirs in zip(*map(jax.tree.leaves, (state, straight[1])), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_loop_of_steps_is_train_bitwise_and_leaves_its_windows_alone(straight, fresh):
    state, losses = fresh, []
    for step in range(TRAINING.steps):
        windows = jax.device_put(training_windows(CORPUS, MODEL.seq_len, TRAINING, step))
        before, (state, loss) = state, train_step(state, windows, TRAINING)
        losses.append(float(loss))
        assert before.step.is_deleted() and not windows.array.is_deleted()
    assert losses == straight[0]


def test_windows_that_have_no_next_token_are_named():
    state = TrainState.init(MODEL, TRAINING)
    windows = training_windows(CORPUS, MODEL.seq_len, TRAINING, step=0)
    with pytest.raises(TypeError, match="windows must be integers, not float32"):
        train_step(state, windows.astype(float), TRAINING)
    with pytest.raises(ValueError, match="windows has 1 position"):
        train_step(state, windows["position", :1], TRAINING)


def test_a_loaded_state_has_the_policy_that_was_asked_for(tmp_path, straight):
    save_state(tmp_path, straight[1], TRAINING)
    loaded, _ = load_state(tmp_path, gradient_checkpointing="full")
    policy = loaded.decoder.stack.gradient_checkpointing
    assert policy == ScanCheckpointPolicy.from_bool_or_str("full")


def test_a_checkpoint_that_is_not_of_a_state_raises(tmp_path):
    save_checkpoint(tmp_path, {"w": jnp.zeros(3)}, about={})
    with pytest.raises(ValueError, match="was not written by save_state"):
        load_state(tmp_path)


def test_two_steps_equal_clipped_adamw_written_out(fresh, loss_and_gradient):
    weights = jax.tree.map(np.array, eqx.filter(fresh.decoder, eqx.is_array))
    state, norms, clipped = fresh, [], []
    for step in range(2):  # the learning rate is zero in the first step and at its peak then
        windows = training_windows(CORPUS, MODEL.seq_len, TRAINING, step)
        g = jax.tree.map(np.array, loss_and_gradient(state.decoder, windows)[1])
        norms.append(
            np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(g)))
        )
        clipped.append(jax.tree.map(lambda leaf: leaf / max(1, norms[-1]), g))  # noqa: B023
        state, _ = next(train(state, CORPUS, TRAINING))

    def expected(path, w, g0, g1):
        m, v = 0.1 * (0.9 * g0 + g1), 0.05 * (0.95 * g0**2 + g1**2)
        update = m / (1 - 0.9**2) / (np.sqrt(v / (1 - 0.95**2)) + 1e-8)
        decay = 0.0 if "norm" in jax.tree_util.keystr(path) else TRAINING.weight_decay
        return w - TRAINING.learning_rate * (update + decay * w)

    assert max(norms) > 1
    wanted = jax.tree_util.tree_map_with_path(expected, weights, *clipped)
    ours = eqx.filter(state.decoder, eqx.is_array)
    for a, b in zip(*map(jax.tree.leaves, (ours, wanted)), strict=True):
        # Where a gradient is all rounding error, so is the direction of its step.
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_windows_depend_on_seed_and_step_and_come_from_the_training_text():
    def windows(seed, step):
        training = dataclasses.replace(TRAINING, seed=seed)
        return np.asarray(training_windows(CORPUS, 8, training, step).array)

    np.testing.assert_array_equal(windows(0, 3), windows(0, 3))
    assert (windows(0, 3) != windows(0, 4)).any() and (windows(0, 3) != windows(1, 3)).any()
    assert all(bytes(w.astype(np.uint8)) in bytes(CORPUS.train) for w in windows(0, 3))


def test_every_byte_of_a_short_text_is_reached():
    corpus = corpus_of([bytes(range(1, 21))])  # 20 of 21 bytes to train on
    training = dataclasses.replace(TRAINING, batch=200)
    windows = training_windows(corpus, 8, training, 0).array
    assert set(np.asarray(windows).ravel().tolist()) == set(range(20))


def test_validation_covers_the_held_out_text_evenly(straight, loss_and_gradient):
    decoder, text = straight[1].decoder, CORPUS.validation
    assert text.size == 64
    windows = np.stack([text[start : start + 9] for start in (0, 18, 36, 55)]).astype(np.int32)
    expected, _ = loss_and_gradient(decoder, hax.named(windows, ("batch", "position")))
    np.testing.assert_allclose(validation_loss(decoder, CORPUS, windows=4), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="windows=0 must be at least 1"):
        validation_loss(decoder, CORPUS, windows=0)
    # No more than fit: 7 windows of 9 bytes.
    assert validation_loss(decoder, CORPUS, windows=7) == validation_loss(decoder, CORPUS)


def test_text_shorter_than_a_sequence_raises_and_says_what_would_do(straight):
    short = corpus_of([b"short"])
    with pytest.raises(ValueError, match="seq_len=8 needs 9 bytes of training text"):
        training_windows(short, 8, TRAINING, 0)
    with pytest.raises(ValueError, match="seq_len=8 needs 9 bytes of validation text"):
        validation_loss(straight[1].decoder, short)


@pytest.mark.parametrize(
    "wrong, needle",
    [
        (dict(steps=0), "steps=0 must be at least 1"),
        (dict(batch=-1), "batch=-1 must be at least 1"),
        (dict(learning_rate=float("inf")), "learning_rate=inf must be a positive number"),
        (dict(clip_norm=0.0), "clip_norm=0.0 must be a positive number"),
        (dict(weight_decay=-1.0), "weight_decay=-1.0 must not be negative"),
        (dict(seed=-1), "seed=-1 must not be negative"),
        (dict(dtype="float16"), "dtype='float16' must be 'float32' or 'bfloat16'"),
    ],
)
def test_numbers_out_of_range_raise_by_name(wrong, needle):
    with pytest.raises(ValueError, match=needle):
        TrainingConfig(**dict(steps=1, batch=1, learning_rate=1.0) | wrong)


def test_a_fraction_of_a_step_raises():
    with pytest.raises(TypeError, match="steps=1.5 must be a whole number"):
        TrainingConfig(steps=1.5, batch=1, learning_rate=1.0)


def test_a_vocabulary_without_all_bytes_raises():
    model = dataclasses.replace(MODEL, vocab_size=128)
    state = eqx.filter_eval_shape(TrainState.init, model, TRAINING)
    with pytest.raises(ValueError, match="vocab_size=128 must be at least 256"):
        next(train(state, CORPUS, TRAINING))
