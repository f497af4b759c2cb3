"""Generating text: one compiled loop over the tokens to come."""

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from haliax import NamedArray
from jax.core import Tracer
from jaxtyping import PRNGKeyArray

from .._axes import POSITION, require_axes
from ._decoder import Decoder
from ._family import family_of
from ._memory import CacheMemory, TextMemory
from ._sample import sample


def generate(
    decoder: Decoder,
    prompt: NamedArray,
    *,
    new_tokens: int,
    mask: NamedArray | None = None,
    stop: int | Sequence[int] = (),
    temperature: float = 1.0,
    top_k: int | None = None,
    key: PRNGKeyArray | None = None,
    prefill_size: int | None = None,
) -> NamedArray:
    """Continues prompts, one token at a time, in one compiled loop.

    A Mamba-2 reads the prompt once and then one token at a time, at a cost that does not depend
    on what came before. For a transformer nothing is cached between tokens: each step runs it over
    the last `config.seq_len` tokens, a window of fixed size whose first token is at position 0 of
    the rotary embedding, as it was in training.

    Args:
        decoder: The model.
        prompt: Integers with an axis "position" of at least 1 and any batch axes.
        new_tokens: Number of tokens to add, at least 1.
        mask: True at real tokens, False at padding, with the axis "position" and the batch axes
            along which sequences differ in length. The real tokens of a sequence are next to each
            other, at least one; padding is on their left, their right or both, and changes
            nothing. None means all are real.
        stop: A token, or several, after which a sequence is complete: the rest of it repeats that
            token. The loop ends when all sequences are complete.
        temperature: As in `sample`.
        top_k: As in `sample`.
        key: As in `sample`. It is split over the tokens.
        prefill_size: Of a Mamba-2 only: number of the prompt's positions that are read at a time,
            which bounds the memory that a long prompt takes. None means all of them.

    Returns:
        int32 tokens with the axes of `prompt`: the prompt as it was given, then the new ones.

    Raises:
        TypeError: if `prompt` is not a NamedArray of integers, `mask` not one of bools, or
            `prefill_size` is given for a transformer.
        ValueError: if `prompt` has no axis "position" of at least 1, `mask` does not fit it or
            has real tokens that are not next to each other, `new_tokens` or `prefill_size` is
            below 1, `stop` is no token, or the choice of `temperature`, `top_k` and `key` is one
            that `sample` refuses.

    Example:
        >>> import haliax as hax
        >>> import jax
        >>> from stackax.lm import Decoder, generate
        >>> from stackax.mamba2 import Mamba2Config
        >>> config = Mamba2Config(layers=2, width=16, head_dim=8, state=8, vocab_size=256)
        >>> decoder = Decoder.init(config, key=jax.random.key(0))
        >>> prompts = hax.named([[1, 2, 3], [7, 0, 0]], ("batch", "position"))
        >>> is_real = hax.named([[True, True, True], [True, False, False]], ("batch", "position"))
        >>> generate(decoder, prompts, mask=is_real, new_tokens=5, temperature=0.0).shape
        {'batch': 2, 'position': 8}
    """
    require_axes("prompt", prompt, POSITION)
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(f"prompt must hold integers, not {prompt.dtype}")
    if prompt.axis_size(POSITION) < 1:
        raise ValueError("prompt is empty: give at least one token to continue")
    _check_counts(decoder, new_tokens, prefill_size)
    if mask is not None:
        _check_mask(mask, prompt)
    stops = _checked_stops(stop, decoder.config.vocab_size)
    how = (new_tokens, temperature, top_k, prefill_size)
    return _generate(decoder, prompt.astype(jnp.int32), mask, stops, key, how)


@eqx.filter_jit
def _generate(decoder, prompt, mask, stops, key, how) -> NamedArray:
    new_tokens, temperature, top_k, prefill_size = how
    Pos = prompt.resolve_axis(POSITION)
    Batch, New = tuple(a for a in prompt.axes if a != Pos), Pos.resize(new_tokens)
    memory = _begin(decoder, prompt.rearrange((*Batch, Pos)), mask, new_tokens, prefill_size)

    def choose(memory, count) -> NamedArray:
        return sample(
            decoder.unembed(memory.hidden(decoder)),
            decoder.config.Vocab,
            temperature=temperature,
            top_k=top_k,
            key=None if key is None else jr.fold_in(key, Pos.size + count),
        ).rearrange(Batch)

    def go_on(carry):
        count, _, _, is_complete, _ = carry
        return (count < new_tokens) & ~is_complete.all()

    def add_token(carry):
        count, memory, last, is_complete, added = carry
        memory = memory.add(decoder, hax.named(last, Batch))
        token = jnp.where(is_complete, last, choose(memory, count).array)
        added = jax.lax.dynamic_update_index_in_dim(added, token, count, added.ndim - 1)
        return count + 1, memory, token, is_complete | jnp.isin(token, stops), added

    first = choose(memory, 0).array
    # Carried: how many tokens there are, what is remembered of all but the last of them, the last
    # one, which sequences are complete, and the tokens. Complete sequences repeat their last.
    added = jnp.broadcast_to(first[..., None], (*first.shape, new_tokens))
    carry = (jnp.asarray(1), memory, first, jnp.isin(first, stops), added)
    count, _, last, _, added = jax.lax.while_loop(go_on, add_token, carry)
    added = jnp.where(jnp.arange(new_tokens) < count, added, last[..., None])
    text = hax.concatenate(
        POSITION, [prompt.rearrange((*Batch, Pos)), hax.named(added, (*Batch, New))]
    )
    return text.rearrange(tuple(a.name for a in prompt.axes))


def _begin(decoder, prompt, mask, new_tokens, prefill_size):
    if mask is not None:
        mask = mask.broadcast_to(prompt.axes).rearrange(prompt.axes)
    if family_of(decoder.config).cache is None:
        return TextMemory.begin(decoder, prompt, mask, room=new_tokens)
    return CacheMemory.begin(decoder, prompt, mask, piece=prefill_size)


def _check_counts(decoder: Decoder, new_tokens: int, prefill_size: int | None) -> None:
    if new_tokens < 1:
        raise ValueError(f"new_tokens={new_tokens} must be at least 1")
    if prefill_size is None:
        return
    if family_of(decoder.config).cache is None:
        raise TypeError("prefill_size is given, but a transformer has no cache yet: leave it out")
    if prefill_size < 1:
        raise ValueError(f"prefill_size={prefill_size} must be at least 1")


def _check_mask(mask: NamedArray, prompt: NamedArray) -> None:
    require_axes("mask", mask, prompt.resolve_axis(POSITION))
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask must hold bools, not {mask.dtype}: give mask != 0")
    extra = [a.name for a in mask.axes if a not in prompt.axes]
    if extra:
        raise ValueError(f"mask has the axes {extra}, which prompt has not: leave them out")
    if isinstance(mask.array, Tracer):
        return  # whoever traces sees to it
    real = np.asarray(mask.rearrange((..., POSITION)).array)
    starts = np.diff(real.astype(np.int8), axis=-1, prepend=0) == 1
    if (starts.sum(-1) != 1).any():
        raise ValueError(
            "mask must be True at one run of positions in each sequence, at least one: move the "
            "real tokens next to each other"
        )


def _checked_stops(stop: int | Sequence[int], vocab_size: int) -> np.ndarray:
    stops = (stop,) if isinstance(stop, int | np.integer) else tuple(stop)
    for token in stops:
        if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise ValueError(f"stop={token!r} must be a token, from 0 to {vocab_size - 1}")
    return np.array(stops, np.int32)
