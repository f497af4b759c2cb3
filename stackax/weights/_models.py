"""Whole models, from a folder and into one."""

import os

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.typing import DTypeLike

from .._policy.policy import RematSpec
from ..lm import Decoder
from ..mamba2 import Mamba2Config
from . import _mamba2, _safetensors
from ._safetensors import Tensors
from ._table import read_rows, write_rows


def load_model(
    directory: str | os.PathLike,
    *,
    dtype: DTypeLike = jnp.float32,
    gradient_checkpointing: RematSpec = False,
) -> Decoder:
    """The model that a folder holds, as `transformers` or `state-spaces/mamba` saved it.

    The folder has a `config.json`, and `model.safetensors` or the shards that an index lists.
    Nothing in them is passed over: a tensor that the model has no place for, a missing one, or
    a key of the config that would change what the model computes and is not known, raises.

    Args:
        directory: The folder.
        dtype: What the blocks compute in, as in `Decoder.init`.
        gradient_checkpointing: What the backward pass keeps of each layer, as in `Decoder.init`.

    Returns:
        The model, with weights in float32 whatever they were saved in.

    Raises:
        FileNotFoundError: if the folder lacks a file.
        ValueError: if config and tensors do not fit each other, or something in them is unknown.

    Example:
        >>> import tempfile
        >>> import jax
        >>> from stackax.lm import Decoder
        >>> from stackax.mamba2 import Mamba2Config
        >>> from stackax.weights import load_model, save_model
        >>> config = Mamba2Config(layers=2, width=16, head_dim=8, state=4, vocab_size=32)
        >>> folder = tempfile.mkdtemp()
        >>> save_model(folder, Decoder.init(config, key=jax.random.key(0)))
        >>> load_model(folder).config.layers
        2
    """
    said = _safetensors.read_config(directory)
    layout = _mamba2.layout_of(said)
    if layout is None:
        raise ValueError(
            f"the config says model_type={said.get('model_type')!r}: only 'mamba2' of transformers "
            "and the models of state-spaces/mamba can be read"
        )
    with _safetensors.opened(directory) as tensors:
        table = _mamba2.EMBEDDING[layout]
        config = _mamba2.read_config(
            said,
            layout,
            embedding_rows=tensors.shape(table)[0],
            has_head=_mamba2.HEAD in tensors,
        )
        like = eqx.filter_eval_shape(
            Decoder.init,
            config,
            key=jr.key(0),
            gradient_checkpointing=gradient_checkpointing,
            dtype=dtype,
        )
        decoder = read_rows(_mamba2.rows(layout), like, tensors)
        if config.tied_head and _mamba2.HEAD in tensors:
            _check_tied(tensors, table)
        tensors.check_all_read()
    return decoder


def save_model(
    directory: str | os.PathLike, decoder: Decoder, *, layout: str = _mamba2.TRANSFORMERS
) -> None:
    """Writes a model into a folder, for `load_model` and for the library of that layout.

    Args:
        directory: The folder; it is made where it does not exist.
        decoder: The model, a Mamba-2.
        layout: "transformers", where rows that pad the vocabulary become tokens, or "mamba_ssm",
            which is that of state-spaces/mamba.

    Raises:
        TypeError: if the model is of another family.
        ValueError: if there is no such layout, or it has no word for what the model's sizes ask
            for.

    Example:
        >>> import os, tempfile
        >>> import jax
        >>> from stackax.lm import Decoder
        >>> from stackax.mamba2 import Mamba2Config
        >>> from stackax.weights import save_model
        >>> config = Mamba2Config(layers=2, width=16, head_dim=8, state=4, vocab_size=32)
        >>> folder = tempfile.mkdtemp()
        >>> save_model(folder, Decoder.init(config, key=jax.random.key(0)), layout="mamba_ssm")
        >>> sorted(os.listdir(folder))
        ['config.json', 'model.safetensors']
    """
    if not isinstance(decoder.config, Mamba2Config):
        raise TypeError(
            f"only a Mamba-2 can be saved, not a model with {type(decoder.config).__name__}: "
            "stackax.lm.save_checkpoint takes any"
        )
    if layout not in _mamba2.EMBEDDING:
        raise ValueError(f"layout={layout!r} must be one of {sorted(_mamba2.EMBEDDING)}")
    said = _mamba2.write_config(decoder.config, layout)
    tensors = write_rows(_mamba2.rows(layout), decoder)
    if layout == _mamba2.MAMBA_SSM:  # which saves a tied head beside its table
        tensors.setdefault(_mamba2.HEAD, tensors[_mamba2.EMBEDDING[layout]])
    _safetensors.write(directory, said, tensors)


def _check_tied(tensors: Tensors, table: str) -> None:
    if not np.array_equal(tensors.read(_mamba2.HEAD), tensors.read(table)):
        raise ValueError(
            f"the config ties the head to the embedding, but {_mamba2.HEAD} differs from {table}: "
            "correct the config, or take the head out"
        )
