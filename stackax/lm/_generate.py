"""Generating text: one compiled loop over the tokens to come."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from .._axes import POSITION, require_axes
from ._decoder import Decoder
from ._sample import sample


def generate(
    decoder: Decoder,
    prompt: NamedArray,
    *,
    new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    key: PRNGKeyArray | None = None,
) -> NamedArray:
    """Continues a prompt, one token at a time, in one compiled loop.

    Nothing is cached between tokens: each step runs the model over the last `config.seq_len`
    tokens, a window of fixed size. That costs a full forward pass per token; the window's first
    token is at position 0 of the rotary embedding, as it was in training.

    Args:
        decoder: The model.
        prompt: Integers with an axis "position" of at least 1 and any batch axes. All sequences
            of a batch are equally long.
        new_tokens: Number of tokens to add, at least 1.
        temperature: As in `sample`.
        top_k: As in `sample`.
        key: As in `sample`. It is split over the tokens.

    Returns:
        int32 tokens with the axes of `prompt`: the prompt, then the new ones.

    Raises:
        TypeError: if `prompt` is not a NamedArray of integers.
        ValueError: if `prompt` has no axis "position" of at least 1, `new_tokens` is below 1, or
            the choice of `temperature`, `top_k` and `key` is one that `sample` refuses.

    Example:
        >>> import haliax as hax
        >>> import jax
        >>> from stackax.lm import Decoder, generate
        >>> from stackax.transformer import TransformerConfig
        >>> config = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
        >>> decoder = Decoder.init(config, key=jax.random.key(0))
        >>> prompt = hax.named([1, 2, 3], "position")
        >>> generate(decoder, prompt, new_tokens=5, temperature=0.0).shape
        {'position': 8}
    """
    require_axes("prompt", prompt, POSITION)
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(f"prompt must hold integers, not {prompt.dtype}")
    if prompt.axis_size(POSITION) < 1:
        raise ValueError("prompt is empty: give at least one token to continue")
    if new_tokens < 1:
        raise ValueError(f"new_tokens={new_tokens} must be at least 1")
    return _generate(decoder, prompt.astype(jnp.int32), new_tokens, temperature, top_k, key)


@eqx.filter_jit
def _generate(decoder, prompt, new_tokens, temperature, top_k, key) -> NamedArray:
    Pos = prompt.resolve_axis(POSITION)
    Total, Window = Pos.resize(Pos.size + new_tokens), decoder.config.Pos
    # The window always fits the buffer; what it holds beyond the last token is never looked at,
    # because attention is causal.
    Buffer = Pos.resize(max(Total.size, Window.size))
    buffer = hax.zeros([a if a != Pos else Buffer for a in prompt.axes], dtype=jnp.int32)
    buffer = buffer.updated_slice({POSITION: 0}, prompt)

    def add_token(at, buffer):
        start = jnp.maximum(at - Window.size, 0)
        hidden = decoder.hidden(buffer.slice({POSITION: start}, {POSITION: Window}))
        last = hidden[POSITION, at - 1 - start]
        token = sample(
            decoder.unembed(last),
            decoder.config.Vocab,
            temperature=temperature,
            top_k=top_k,
            key=None if key is None else jr.fold_in(key, at),
        )
        return buffer.updated_slice({POSITION: at}, token.broadcast_axis(Axis(POSITION, 1)))

    buffer = jax.lax.fori_loop(Pos.size, Total.size, add_token, buffer)
    return buffer.slice({POSITION: 0}, {POSITION: Total})
