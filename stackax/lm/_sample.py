"""Choosing a token from logits, as a function without weights."""

import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from .._axes import axis_name, require_axes


def sample(
    logits: NamedArray,
    Vocab: Axis | str,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    key: PRNGKeyArray | None = None,
) -> NamedArray:
    r"""Draws one token per distribution, from the softmax of \(l / \mathrm{temperature}\).

    Args:
        logits: Scores with `Vocab` and any other axes.
        Vocab: The axis of the tokens.
        temperature: Above 1 flattens the distribution, below 1 sharpens it; 0 takes the likeliest
            token (the first of equals), without chance.
        top_k: Draw from the `top_k` likeliest tokens only, and from all that are as likely as the
            last of them. None means from all.
        key: A PRNG key. Only a temperature of 0 does without.

    Returns:
        int32 tokens, with the other axes of `logits`.

    Raises:
        TypeError: if `logits` is not a NamedArray.
        ValueError: if `logits` lacks `Vocab`, `temperature` is negative or not finite, `top_k`
            is not between 1 and the size of `Vocab`, `top_k` comes with a temperature of 0, where
            it could change nothing, or `key` is missing.

    Example:
        >>> import haliax as hax
        >>> import jax
        >>> from stackax.lm import sample
        >>> logits = hax.named([0.0, 5.0, 4.0], "vocab")
        >>> int(sample(logits, "vocab", temperature=0.0).array)
        1
        >>> int(sample(logits, "vocab", top_k=1, key=jax.random.key(0)).array)
        1
    """
    require_axes("logits", logits, Vocab)
    Vocab = logits.resolve_axis(axis_name(Vocab))
    _check_choices(Vocab, temperature, top_k, key)
    rest = tuple(axis for axis in logits.axes if axis != Vocab)
    scores = logits.rearrange((*rest, Vocab)).array.astype(jnp.float32)
    if temperature == 0 or key is None:
        tokens = jnp.argmax(scores, axis=-1)
    else:
        if top_k is not None:
            lowest = jax.lax.top_k(scores, top_k)[0][..., -1:]
            scores = jnp.where(scores < lowest, -jnp.inf, scores)
        tokens = jr.categorical(key, scores / temperature, axis=-1)
    return hax.named(tokens.astype(jnp.int32), rest)


def _check_choices(Vocab, temperature, top_k, key) -> None:
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} must be 0 or a positive number")
    if top_k is not None and not 1 <= top_k <= Vocab.size:
        raise ValueError(f"top_k={top_k} must be between 1 and {Vocab.size}, the size of Vocab")
    if temperature == 0 and top_k is not None:
        raise ValueError(
            f"top_k={top_k} changes nothing where temperature=0: leave one of them out"
        )
    if temperature > 0 and key is None:
        raise ValueError(f"temperature={temperature} draws by chance: give key=jax.random.key(0)")
