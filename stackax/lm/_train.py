"""Training a decoder on a corpus of bytes, and judging it."""

from collections.abc import Iterator

import equinox as eqx
import haliax as hax
import numpy as np
from haliax import NamedArray
from jaxtyping import Array, Float

from .._axes import BATCH, POSITION
from ._config import TrainingConfig
from ._corpus import Corpus
from ._decoder import Decoder
from ._loss import check_tokens, next_token_loss
from ._state import TrainState, optimizer_of


def train(
    state: TrainState, corpus: Corpus, training: TrainingConfig
) -> Iterator[tuple[TrainState, Float[Array, ""]]]:
    """Trains from `state` on, to the last of `training.steps`, yielding after every step.

    What a step sees depends on the seed and the step's number alone, so training that goes on
    from a saved state does the same as training that was never interrupted.

    Args:
        state: Where to go on from. Its buffers are reused: only the last state yielded is valid.
        corpus: The text.
        training: How to train, as it was when the state was made.

    Yields:
        The new state, and the loss of the step in nats per byte, before its update.

    Raises:
        ValueError: if the text is shorter than a sequence, or the vocabulary below 256.

    Example:
        >>> from stackax.lm import TrainingConfig, TrainState, corpus_of, train
        >>> from stackax.transformer import TransformerConfig
        >>> model = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
        >>> training = TrainingConfig(steps=20, batch=4, learning_rate=1e-2)
        >>> losses = []
        >>> state = TrainState.init(model, training)
        >>> for state, loss in train(state, corpus_of([b"to be or not to be " * 9]), training):
        ...     losses.append(float(loss))
        >>> losses[-1] < losses[0]
        True
    """
    model = state.decoder.config
    if model.vocab_size < 256:
        raise ValueError(f"vocab_size={model.vocab_size} must be at least 256 for a text of bytes")
    for step in range(int(state.step), training.steps):
        windows = training_windows(corpus, model.seq_len, training, step)
        state, loss = train_step(state, windows, training)
        yield state, loss


def train_step(
    state: TrainState, windows: NamedArray, training: TrainingConfig
) -> tuple[TrainState, Float[Array, ""]]:
    """One step of `train`, for a loop of your own or to ask the compiler what it needs.

    Args:
        state: Where to go on from. Its buffers are reused: it can't be used afterwards.
        windows: The sequences of the step, as `training_windows` draws them: integers with the
            axes "batch" and "position", the latter one longer than what is predicted.
        training: How to train, as it was when the state was made.

    Returns:
        The new state, and the loss of the step in nats per byte, before its update.

    Raises:
        TypeError: if `windows` is not a NamedArray of integers.
        ValueError: if `windows` has no axis "position" of at least 2.

    Example:
        >>> from stackax.lm import TrainingConfig, TrainState, corpus_of
        >>> from stackax.lm import train_step, training_windows
        >>> from stackax.transformer import TransformerConfig
        >>> model = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
        >>> training = TrainingConfig(steps=20, batch=4, learning_rate=1e-2)
        >>> state = TrainState.init(model, training)
        >>> corpus = corpus_of([b"to be or not to be " * 9])
        >>> windows = training_windows(corpus, model.seq_len, training, step=0)
        >>> state, loss = train_step(state, windows, training)
        >>> int(state.step)
        1
    """
    check_tokens("windows", windows)
    return _train_step((windows, training), state)


def validation_loss(decoder: Decoder, corpus: Corpus, *, windows: int = 64) -> float:
    """The loss on text that training never saw.

    Args:
        decoder: The model.
        corpus: The text; only its validation part is used.
        windows: Number of sequences, spread evenly over it. Fewer are used where they would
            overlap.

    Returns:
        The mean loss of their bytes, in nats per byte.

    Raises:
        ValueError: if the validation text is shorter than a sequence, or `windows` is below 1.

    Example:
        >>> from stackax.lm import TrainingConfig, TrainState, corpus_of, validation_loss
        >>> from stackax.transformer import TransformerConfig
        >>> model = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
        >>> training = TrainingConfig(steps=20, batch=4, learning_rate=1e-2)
        >>> state = TrainState.init(model, training)
        >>> 5 < validation_loss(state.decoder, corpus_of([b"to be or not to be " * 20])) < 6
        True
    """
    if windows < 1:
        raise ValueError(f"windows={windows} must be at least 1")
    size = decoder.config.seq_len + 1
    text = corpus.validation
    _check_length("validation", text, size)
    count = min(windows, text.size // size)
    starts = np.linspace(0, text.size - size, count).astype(np.int64)
    return float(_loss(decoder, _windows(text, starts, size)))


def training_windows(
    corpus: Corpus, seq_len: int, training: TrainingConfig, step: int
) -> NamedArray:
    """The sequences that a step trains on.

    Args:
        corpus: The text; only its training part is used.
        seq_len: Number of positions that are predicted.
        training: The seed and the number of sequences.
        step: The number of the step, from 0.

    Returns:
        int32 bytes, with the axes "batch" and "position", the latter of size `seq_len + 1`.

    Raises:
        ValueError: if the text is shorter than a sequence.

    Example:
        >>> from stackax.lm import TrainingConfig, corpus_of, training_windows
        >>> training = TrainingConfig(steps=20, batch=4, learning_rate=1e-2)
        >>> training_windows(corpus_of([b"to be or not to be"]), 8, training, step=0).shape
        {'batch': 4, 'position': 9}
    """
    _check_length("training", corpus.train, seq_len + 1)
    chance = np.random.default_rng([training.seed, step])
    starts = chance.integers(0, corpus.train.size - seq_len, training.batch)
    return _windows(corpus.train, starts, seq_len + 1)


def _check_length(part: str, text: np.ndarray, size: int) -> None:
    if text.size < size:
        raise ValueError(
            f"seq_len={size - 1} needs {size} bytes of {part} text, but there are {text.size}: "
            f"give seq_len={max(text.size - 1, 1)} or more text"
        )


def _windows(text: np.ndarray, starts: np.ndarray, size: int) -> NamedArray:
    windows = text[starts[:, None] + np.arange(size)].astype(np.int32)
    return hax.named(windows, (BATCH, POSITION))


_loss = eqx.filter_jit(next_token_loss)


# Donated is what comes after the first argument.
@eqx.filter_jit(donate="all-except-first")
def _train_step(
    given: tuple[NamedArray, TrainingConfig], state: TrainState
) -> tuple[TrainState, Float[Array, ""]]:
    windows, training = given
    loss, gradient = eqx.filter_value_and_grad(next_token_loss)(state.decoder, windows)
    weights = eqx.filter(state.decoder, eqx.is_inexact_array)
    updates, optimizer_state = optimizer_of(training).update(
        gradient, state.optimizer_state, weights
    )
    decoder = eqx.apply_updates(state.decoder, updates)
    return TrainState(decoder, optimizer_state, state.step + 1), loss
