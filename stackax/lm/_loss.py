"""Cross-entropy, and the loss of predicting each next token."""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import Array, Float

from .._axes import POSITION, VOCAB, axis_name, require_axes
from .._loop.loop import fold
from ._decoder import Decoder


def cross_entropy(logits: NamedArray, targets: NamedArray, Vocab: Axis | str) -> NamedArray:
    r"""The negative log-likelihood of each target, \(\log \sum_v e^{l_v} - l_t\), in nats.

    Args:
        logits: Scores with `Vocab` and the axes of `targets`, in any floating-point dtype; the
            sum runs in float32.
        targets: The index of the right entry along `Vocab`, integers.
        Vocab: The axis of the classes.

    Returns:
        The losses, in float32, with the axes of `targets`.

    Raises:
        TypeError: if an argument is not a NamedArray, or `targets` are not integers.
        ValueError: if the axes of `logits` are not those of `targets` and `Vocab`.

    Example:
        >>> import haliax as hax
        >>> from stackax.lm import cross_entropy
        >>> logits = hax.zeros({"position": 3, "vocab": 256})
        >>> float(cross_entropy(logits, hax.zeros({"position": 3}, dtype=int), "vocab").array[0])
        5.545177459716797
    """
    require_axes("targets", targets)
    require_axes("logits", logits, Vocab, *targets.axes)
    if len(logits.axes) != len(targets.axes) + 1:
        require_axes("targets", targets, *(a for a in logits.axes if a.name != axis_name(Vocab)))
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets must be integers, not {targets.dtype}")
    Vocab = logits.resolve_axis(axis_name(Vocab))
    scores = logits.rearrange((*targets.axes, Vocab)).array.astype(jnp.float32)
    chosen = jnp.take_along_axis(scores, targets.array[..., None], axis=-1)[..., 0]
    return hax.named(jax.nn.logsumexp(scores, axis=-1) - chosen, targets.axes)


def next_token_loss(
    decoder: Decoder, tokens: NamedArray, *, chunk: int | None = None
) -> Float[Array, ""]:
    """The mean loss of predicting each token of a sequence from those before it.

    Args:
        decoder: The model.
        tokens: Integers with an axis "position" of at least 2 and any batch axes. The last one is
            only a target, the first one only an input.
        chunk: Number of positions whose logits exist at a time, a divisor of the number of
            targets. The backward pass computes each chunk's logits again, so they never take more
            memory than one chunk: worth it for a large vocabulary. None means all at once.

    Returns:
        The loss in nats per token, a float32 scalar.

    Raises:
        TypeError: if `tokens` is not a NamedArray of integers.
        ValueError: if `tokens` has no axis "position" of at least 2, or `chunk` does not divide
            the number of targets.

    Example:
        >>> import equinox as eqx
        >>> import haliax as hax
        >>> import jax
        >>> from stackax.lm import Decoder, next_token_loss
        >>> from stackax.transformer import TransformerConfig
        >>> config = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
        >>> decoder = Decoder.init(config, key=jax.random.key(0))
        >>> tokens = hax.zeros({"batch": 4, "position": 9}, dtype=int)
        >>> eqx.filter_jit(next_token_loss)(decoder, tokens).shape
        ()
    """
    inputs, targets = _shift(tokens)
    Chunks, InChunk = _chunked(targets.resolve_axis(POSITION), chunk)
    hidden = decoder.hidden(inputs)
    if chunk is None:
        return cross_entropy(decoder.unembed(hidden), targets, VOCAB).mean().scalar()
    hidden, targets = (x.unflatten_axis(POSITION, (Chunks, InChunk)) for x in (hidden, targets))

    def add_loss(total, hidden, targets):
        return total + cross_entropy(decoder.unembed(hidden), targets, VOCAB).sum().scalar()

    total = fold(add_loss, Chunks, remat=True)(jnp.zeros(()), hidden, targets)
    return total / targets.array.size


def _shift(tokens: NamedArray) -> tuple[NamedArray, NamedArray]:
    check_tokens("tokens", tokens)
    return tokens[POSITION, : tokens.axis_size(POSITION) - 1], tokens[POSITION, 1:]


def check_tokens(name: str, tokens: NamedArray) -> None:
    """Raises unless these are sequences of integers that have a next one; `name` is the caller's
    for them."""
    require_axes(name, tokens, POSITION)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, not {tokens.dtype}")
    size = tokens.axis_size(POSITION)
    if size < 2:
        raise ValueError(f"{name} has {size} position, but a next token needs at least 2")


def _chunked(Pos: Axis, chunk: int | None) -> tuple[Axis, Axis]:
    chunk = Pos.size if chunk is None else chunk
    if chunk < 1 or Pos.size % chunk:
        raise ValueError(f"chunk={chunk} must divide the {Pos.size} positions that are predicted")
    return Axis("chunk", Pos.size // chunk), Pos.resize(chunk)
