"""Causal depthwise convolution over plain arrays, of a whole sequence and of one token."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._resets import find_resets
from ._shapes import bind_shapes, require_floating

Activation = Literal["silu"] | None


def causal_conv(
    x: Float[Array, "*batch T C"],
    weight: Float[Array, "k C"],
    bias: Float[Array, " C"] | None = None,
    *,
    initial_window: Float[Array, "*batch k-1 C"] | None = None,
    mask: Bool[Array, "*batch T"] | None = None,
    segment_ids: Int[Array, "*batch T"] | None = None,
    previous_segment_id: Int[Array, "*batch"] | None = None,
    activation: Activation = "silu",
) -> tuple[Float[Array, "*batch T C"], Float[Array, "*batch k-1 C"]]:
    r"""Mixes each channel with its own last k tokens.

    \(y_t = f(b + \sum_{j<k} w_j\, x_{t-k+1+j})\). Before the first token stands `initial_window`;
    what belongs to another document, and padding, counts as zeros.

    Args:
        x: Inputs: T tokens of C channels.
        weight: k taps a channel; the last one meets the token itself.
        bias: Added before the activation.
        initial_window: The k - 1 inputs before the first real token, as this function and
            `causal_conv_step` return them. None means zeros.
        mask: True at real tokens, which are next to each other in each sequence, with padding on
            the left, on the right or on both sides. Outputs at padding mean nothing.
        segment_ids: The document of each token; a document does not see the one before it.
        previous_segment_id: The document of `initial_window`, where a packed sequence is
            continued. None means the document of the first real token.
        activation: `"silu"`, or None for none.

    Returns:
        The outputs, with the shape and dtype of `x`, and the window behind each sequence's last
        real token: its last k - 1 inputs, with zeros for those of an earlier document.

    Raises:
        TypeError: if an argument is not an array, or of the wrong kind of dtype.
        ValueError: if shapes do not fit, there is no such activation, or `previous_segment_id` is
            given without `segment_ids`.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2 import causal_conv
        >>> x, weight = jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[10.0], [1.0]])
        >>> y, window = causal_conv(x, weight, activation=None)
        >>> y[:, 0].tolist(), window[:, 0].tolist()
        ([1.0, 12.0, 23.0], [3.0])
    """
    sizes = bind_shapes(
        {
            "x": (x, "*batch T C"),
            "weight": (weight, "k C"),
            "bias": (bias, "C"),
            "mask": (mask, "*batch T"),
            "segment_ids": (segment_ids, "*batch T"),
            "previous_segment_id": (previous_segment_id, "*batch"),
        }
    )
    _check(x, weight, bias, initial_window, sizes, activation)
    resets = None
    if segment_ids is not None:
        resets = find_resets(segment_ids, mask, previous_segment_id)
    elif previous_segment_id is not None:
        raise ValueError("previous_segment_id is given, but segment_ids is not: give both")
    if initial_window is None:
        initial_window = jnp.zeros((*sizes["*batch"], sizes["k"] - 1, sizes["C"]), x.dtype)
    run = _conv_of_sequence
    for _ in sizes["*batch"]:
        run = jax.vmap(run, in_axes=(0, None, None, 0, 0, 0, None))
    return run(x, weight, bias, initial_window.astype(x.dtype), mask, resets, activation)


def causal_conv_step(
    x: Float[Array, "*batch C"],
    window: Float[Array, "*batch k-1 C"],
    weight: Float[Array, "k C"],
    bias: Float[Array, " C"] | None = None,
    *,
    mask: Bool[Array, " *batch"] | None = None,
    activation: Activation = "silu",
) -> tuple[Float[Array, "*batch C"], Float[Array, "*batch k-1 C"]]:
    """One token of `causal_conv`.

    Args:
        x: The token's input.
        window: The k - 1 inputs before it.
        weight: As in `causal_conv`.
        bias: As in `causal_conv`.
        mask: False for sequences whose window passes unchanged; their output means nothing.
        activation: As in `causal_conv`.

    Returns:
        The output, with the shape and dtype of `x`, and the window behind the token, with the
        dtype of `window`.

    Raises:
        TypeError: if an argument is not an array, or of the wrong kind of dtype.
        ValueError: if shapes do not fit, or there is no such activation.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2 import causal_conv_step
        >>> weight = jnp.array([[10.0], [1.0]])
        >>> window = jnp.full((1, 1), 2.0)
        >>> y, window = causal_conv_step(jnp.ones(1), window, weight, activation=None)
        >>> y.tolist(), window.tolist()
        ([21.0], [[1.0]])
    """
    sizes = bind_shapes(
        {
            "x": (x, "*batch C"),
            "weight": (weight, "k C"),
            "bias": (bias, "C"),
            "mask": (mask, "*batch"),
        }
    )
    _check(x, weight, bias, window, sizes, activation)
    seen = jnp.concatenate([window, x[..., None, :].astype(window.dtype)], axis=-2)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.sum(seen.astype(wide) * weight.astype(wide), axis=-2)
    new = seen[..., 1:, :]
    if mask is not None:
        new = jnp.where(mask[..., None, None], new, window)
    return _activate(y, bias, activation).astype(x.dtype), new


def _conv_of_sequence(x, weight, bias, window, mask, resets, activation):
    (T, _), k = x.shape, weight.shape[0]
    begin, end = 0, T
    if mask is not None:
        begin = jnp.argmax(jnp.append(mask, True))
        end = T - jnp.argmax(jnp.append(mask[::-1], True))
        end = jnp.where(begin == T, T, end)
        x = jnp.where(mask[:, None], x, 0)
    seen = _behind(window, x, begin)
    start = None if resets is None else jax.lax.cummax(jnp.where(resets, jnp.arange(T), -k))
    y = _taps(seen, weight, T, start)
    new = jax.lax.dynamic_slice_in_dim(seen, end, k - 1)
    if start is not None and T:
        position = end - (k - 1) + jnp.arange(k - 1)
        new = jnp.where((position >= start[end - 1])[:, None], new, 0)
    return _activate(y, bias, activation).astype(x.dtype), new


def _behind(window, x, begin):
    """The sequence with the window right before its first real token, (k - 1 + T, C)."""
    if isinstance(begin, int):
        return jnp.concatenate([window, x])
    padded = jnp.pad(x, [(len(window), 0), (0, 0)])
    return jax.lax.dynamic_update_slice_in_dim(padded, window, begin, 0)


def _taps(seen, weight, T, start):
    wide = jnp.promote_types(seen.dtype, jnp.float32)
    k = weight.shape[0]
    total = jnp.zeros((T, seen.shape[1]), wide)
    for j in range(k):
        tap = seen[j : j + T].astype(wide) * weight[j].astype(wide)
        if start is not None:
            tap = jnp.where((jnp.arange(T) - (k - 1 - j) >= start)[:, None], tap, 0)
        total = total + tap
    return total


def _activate(y, bias, activation):
    y = y if bias is None else y + bias.astype(y.dtype)
    return jax.nn.silu(y) if activation == "silu" else y


def _check(x, weight, bias, window, sizes, activation) -> None:
    require_floating(x=x, weight=weight, bias=bias, window=window)
    if activation not in ("silu", None):
        raise ValueError(f"activation={activation!r} is not known: give 'silu' or None")
    wanted = (*sizes["*batch"], sizes["k"] - 1, sizes["C"])
    if window is not None and window.shape != wanted:
        raise ValueError(
            f"the window has shape {window.shape}, but needs {wanted}: the {sizes['k'] - 1} inputs "
            f"before the first token"
        )
