"""What training changes, saved and loaded."""

import dataclasses
import os
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Int

from .._policy.policy import RematSpec
from ._checkpoint import load_checkpoint, read_about, save_checkpoint
from ._config import TrainingConfig
from ._decay import weight_decay_mask
from ._decoder import Decoder
from ._family import ModelConfig, config_of_family, family_of


class TrainState(eqx.Module):
    """All that training changes: what a checkpoint holds.

    Attributes:
        decoder: The model.
        optimizer_state: That of optax, its arrays with the axes of the weights that they are for.
        step: The number of steps that were taken, an int32 scalar.
    """

    decoder: Decoder
    optimizer_state: optax.OptState
    step: Int[Array, ""]

    @staticmethod
    def init(
        model: ModelConfig,
        training: TrainingConfig,
        *,
        gradient_checkpointing: RematSpec = False,
    ) -> "TrainState":
        """The state before the first step.

        Args:
            model: The sizes of the decoder, a `TransformerConfig` or a `Mamba2Config`.
            training: How it is trained; the seed decides the weights.
            gradient_checkpointing: What the backward pass keeps of each layer.

        Returns:
            The state.

        Example:
            >>> from stackax.lm import TrainingConfig, TrainState
            >>> from stackax.transformer import TransformerConfig
            >>> model = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
            >>> training = TrainingConfig(steps=20, batch=4, learning_rate=1e-2)
            >>> int(TrainState.init(model, training).step)
            0
        """
        decoder = Decoder.init(
            model,
            key=jr.key(training.seed),
            gradient_checkpointing=gradient_checkpointing,
            dtype=training.dtype,
        )
        weights = eqx.filter(decoder, eqx.is_inexact_array)
        return TrainState(decoder, optimizer_of(training).init(weights), jnp.zeros((), jnp.int32))


def save_state(
    directory: str | os.PathLike, state: TrainState, training: TrainingConfig, **about: Any
) -> None:
    """Writes a checkpoint from which training goes on as if it had never stopped.

    Args:
        directory: Where the checkpoint goes, as in `save_checkpoint`.
        state: What training has changed.
        training: How it is trained.
        **about: More for `read_about` to tell, anything that JSON can hold, by other names than
            "family", "model", "training" and "step".

    Example:
        >>> import tempfile
        >>> from stackax.lm import TrainingConfig, TrainState, read_about, save_state
        >>> from stackax.transformer import TransformerConfig
        >>> model = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
        >>> training = TrainingConfig(steps=20, batch=4, learning_rate=1e-2)
        >>> folder = tempfile.mkdtemp()
        >>> save_state(folder, TrainState.init(model, training), training, text="a book")
        >>> read_about(folder)["model"]["width"], read_about(folder)["text"]
        (16, 'a book')
    """
    about |= {
        "family": family_of(state.decoder.config).name,
        "model": dataclasses.asdict(state.decoder.config),
        "training": dataclasses.asdict(training),
        "step": int(state.step),
    }
    save_checkpoint(directory, state, about)


def load_state(
    directory: str | os.PathLike, *, gradient_checkpointing: RematSpec = False
) -> tuple[TrainState, TrainingConfig]:
    """What `save_state` wrote into `directory`.

    Args:
        directory: Where the checkpoint is.
        gradient_checkpointing: What the backward pass keeps of each layer from now on; it is not
            saved.

    Returns:
        The state, and how it was trained.

    Raises:
        FileNotFoundError: if `directory` holds no checkpoint.
        ValueError: if the checkpoint is not one of `save_state`.

    Example:
        >>> import tempfile
        >>> from stackax.lm import TrainingConfig, TrainState, load_state, save_state
        >>> from stackax.transformer import TransformerConfig
        >>> model = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
        >>> training = TrainingConfig(steps=20, batch=4, learning_rate=1e-2)
        >>> folder = tempfile.mkdtemp()
        >>> save_state(folder, TrainState.init(model, training), training)
        >>> state, training = load_state(folder)
        >>> state.decoder.config.width, training.steps
        (16, 20)
    """
    about = read_about(directory)
    if not {"model", "training"} <= about.keys():
        raise ValueError(f"the checkpoint in {directory} was not written by save_state")
    # A checkpoint of a time when there was one family does not say which.
    model = config_of_family(about.get("family", "transformer"), about["model"])
    training = TrainingConfig(**about["training"])
    like = eqx.filter_eval_shape(
        TrainState.init, model, training, gradient_checkpointing=gradient_checkpointing
    )
    return load_checkpoint(directory, like), training


def optimizer_of(training: TrainingConfig) -> optax.GradientTransformation:
    """The optimizer that a config describes.

    Example:
        >>> from stackax.lm import TrainingConfig
        >>> from stackax.lm._state import optimizer_of
        >>> optimizer_of(TrainingConfig(steps=20, batch=4, learning_rate=1e-2)).init is not None
        True
    """
    peak = training.learning_rate
    rate = optax.warmup_cosine_decay_schedule(
        0.0, peak, training.warmup_steps, max(training.steps, 2), peak / 10
    )
    return optax.chain(
        optax.clip_by_global_norm(training.clip_norm),
        optax.adamw(rate, b2=0.95, weight_decay=training.weight_decay, mask=weight_decay_mask),
    )
