"""What generation remembers of a text: the text itself, or a cache of it.

Both kinds begin with a prompt, tell the hidden features after the last token, and take one token
more. Shapes: `tokens` (*batch, position), `mask` likewise, `lengths` (*batch).
"""

import math
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Int

from .._axes import POSITION
from ._decoder import Decoder


class TextMemory(eqx.Module):
    """The text of each sequence, of which a model without a cache reads the end at every token.

    Attributes:
        tokens: The sequences, each from the first position on; what is beyond its end is never
            looked at, because attention is causal.
        lengths: How many tokens each has.
        Batch: The batch axes.
    """

    tokens: Int[Array, "*batch position"]
    lengths: Int[Array, "*batch"]
    Batch: tuple[Axis, ...] = eqx.field(static=True)

    @staticmethod
    def begin(
        decoder: Decoder, prompt: NamedArray, mask: NamedArray | None, *, room: int
    ) -> "TextMemory":
        """What is remembered of a prompt.

        Args:
            decoder: The model.
            prompt: The sequences, with "position" last.
            mask: True at real tokens, with the axes of `prompt`. None means all of them.
            room: How many tokens will be added.

        Returns:
            The memory.
        """
        tokens, Batch = prompt.array, prompt.axes[:-1]
        lengths = jnp.full(tokens.shape[:-1], tokens.shape[-1])
        if mask is not None:
            real_first = jnp.argsort(~mask.array, axis=-1, stable=True)
            tokens = jnp.take_along_axis(tokens, real_first, axis=-1)
            lengths = mask.array.sum(-1)
        size = max(tokens.shape[-1] + room, decoder.config.Pos.size)
        padding = [(0, 0)] * len(Batch) + [(0, size - tokens.shape[-1])]
        return TextMemory(jnp.pad(tokens, padding), lengths, Batch)

    def hidden(self, decoder: Decoder) -> NamedArray:
        """The features that the logits of the next token are made of.

        Args:
            decoder: The model.

        Returns:
            An array with the batch axes and `Embed`.
        """
        Window, Embed = decoder.config.Pos, decoder.config.Embed
        start = jnp.maximum(self.lengths - Window.size, 0)
        seen = start[..., None] + jnp.arange(Window.size)
        window = jnp.take_along_axis(self.tokens, seen, axis=-1)
        hidden = decoder.hidden(hax.named(window, (*self.Batch, Window)))
        hidden = hidden.rearrange((*self.Batch, Window, Embed)).array
        return hax.named(_at(hidden, self.lengths - 1 - start), (*self.Batch, Embed))

    def add(self, decoder: Decoder, token: NamedArray) -> "TextMemory":
        """The memory after one token more.

        Args:
            decoder: The model.
            token: A token of each sequence.

        Returns:
            The memory.
        """
        is_end = jnp.arange(self.tokens.shape[-1]) == self.lengths[..., None]
        added = token.rearrange(self.Batch).array[..., None]
        return TextMemory(jnp.where(is_end, added, self.tokens), self.lengths + 1, self.Batch)


class CacheMemory(eqx.Module):
    """The cache of a model that has one, and the features after the last token.

    Attributes:
        cache: What the layers remember.
        features: The normalised residual stream after the last token of each sequence.
    """

    cache: Any
    features: NamedArray

    @staticmethod
    def begin(
        decoder: Decoder, prompt: NamedArray, mask: NamedArray | None, *, piece: int | None
    ) -> "CacheMemory":
        """What is remembered of a prompt.

        Args:
            decoder: The model.
            prompt: The sequences, with "position" last.
            mask: True at real tokens, with the axes of `prompt`. None means all of them.
            piece: How many positions are read at a time. None means all of them.

        Returns:
            The memory.
        """
        *Batch, Pos = prompt.axes
        cache = decoder.init_cache(Batch)
        if piece is None or piece >= Pos.size:
            return CacheMemory(*_read(decoder, prompt, mask, cache, None))
        return _begin_in_pieces(decoder, prompt, mask, cache, piece)

    def hidden(self, decoder: Decoder) -> NamedArray:
        """The features that the logits of the next token are made of.

        Args:
            decoder: The model.

        Returns:
            An array with the batch axes and `Embed`.
        """
        return self.features

    def add(self, decoder: Decoder, token: NamedArray) -> "CacheMemory":
        """The memory after one token more.

        Args:
            decoder: The model.
            token: A token of each sequence.

        Returns:
            The memory.
        """
        features, cache = decoder.step(token, self.cache)
        return CacheMemory(cache, features.rearrange(self.features.axes))


def _begin_in_pieces(decoder, prompt, mask, cache, size) -> CacheMemory:
    *Batch, Pos = prompt.axes
    pieces, Piece = math.ceil(Pos.size / size), Pos.resize(size)
    padding = pieces * size - Pos.size
    if mask is None and padding:
        mask = hax.ones(prompt.axes, dtype=bool)
    prompt, mask = _padded(prompt, padding), None if mask is None else _padded(mask, padding)

    # From piece to piece: the cache, and the features after each sequence's last token so far.
    def read_piece(index, memory):
        tokens = _piece(prompt, index * size, Piece)
        real = None if mask is None else _piece(mask, index * size, Piece)
        return CacheMemory(*_read(decoder, tokens, real, memory.cache, memory.features))

    first = jax.eval_shape(lambda: decoder.hidden(prompt[POSITION, 0:1])[POSITION, 0])
    features = hax.zeros((*Batch, decoder.config.Embed), first.dtype)
    return jax.lax.fori_loop(0, pieces, read_piece, CacheMemory(cache, features))


def _read(decoder, tokens, mask, cache, before) -> tuple[Any, NamedArray]:
    """The cache after a piece, and the features after its last real token, or those before it."""
    *Batch, Pos = tokens.axes
    axes = (*Batch, decoder.config.Embed)
    hidden, cache = decoder.prefill(tokens, cache, mask=mask)
    hidden = hidden.rearrange((*Batch, Pos, decoder.config.Embed)).array
    if mask is None:
        return cache, hax.named(hidden[..., -1, :], axes)
    last = jnp.max(jnp.where(mask.array, jnp.arange(Pos.size), -1), axis=-1)
    features = _at(hidden, jnp.maximum(last, 0))
    if before is not None:
        features = jnp.where(last[..., None] < 0, before.array, features)
    return cache, hax.named(features, axes)


def _at(hidden: Array, index: Array) -> Array:
    """`hidden` of shape (*batch, position, embed) at one position of each sequence."""
    return jnp.take_along_axis(hidden, index[..., None, None], axis=-2)[..., 0, :]


def _piece(x: NamedArray, start, Piece: Axis) -> NamedArray:
    return x.slice({POSITION: start}, {POSITION: Piece})


def _padded(x: NamedArray, padding: int) -> NamedArray:
    array = jnp.pad(x.array, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return hax.named(array, (*x.axes[:-1], x.axes[-1].resize(array.shape[-1])))
