"""Decays over all segments of a sequence, from sums of which none is a difference."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class SegmentDecays(NamedTuple):
    """Exponentials of sums over the segments of Q log-decays."""

    between: Float[Array, "*batch Q Q"]
    to_row: Float[Array, "*batch Q"]
    after_column: Float[Array, "*batch Q"]
    total: Float[Array, " *batch"]


def segment_decays(a: Float[Array, "*batch Q"]) -> SegmentDecays:
    r"""\(e^{\sum_{s<k\le l} a_k}\) for \(s \le l\), 0 above the diagonal; and the outer segments'.

    A difference of cumulative sums, \(\sum_{k\le l} - \sum_{k\le s}\), loses all digits where both
    are large and the segment's own sum is small, and is NaN where an \(a_k\) is minus infinity.
    Here only entries of the segment are added. Segments inside a block of about \(\sqrt Q\) are
    summed one by one; the decay over a longer one is the product of three, over the rest of a
    block, the blocks between and the begin of another, so that few exponentials are computed.
    The triangles are static and applied to the exponents: a mask after the exponential would
    multiply an infinity by 0 in the gradient.

    Args:
        a: Log-decays, at most 0; minus infinity is one of them. Q is best a multiple of 8.

    Returns:
        `between` for \(s\) and \(l\); `to_row` from the start to \(l\), inclusive; `after_column`
        from behind \(s\) to the end; `total`.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2._segment_decays import segment_decays
        >>> decays = segment_decays(jnp.log(jnp.array([0.5, 0.5, 0.25])))
        >>> decays.between.tolist()
        [[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.125, 0.25, 1.0]]
        >>> decays.to_row.tolist(), decays.after_column.tolist(), decays.total.tolist()
        ([0.5, 0.25, 0.0625], [0.125, 0.25, 1.0], 0.0625)
    """
    size = a.shape[-1]
    inner = _block_size(size)
    if inner == size:
        return _exponentials(_sums(a))
    outer = size // inner
    blocks = a.reshape(*a.shape[:-1], outer, inner)
    inside = _sums(blocks)
    over = _sums(inside.total)  # behind block s, up to the end of block l
    until = _shift(over.to_row, 0.0)  # up to the start of block l
    begin, rest, within = (jnp.exp(part) for part in (inside.to_row, inside.after, inside.between))
    gap = jnp.exp(_shift(over.between, -jnp.inf, axis=-2))  # behind block s, up to that start

    to_start = (begin[..., None] * gap[..., None, :]).reshape(*a.shape, outer, 1)
    across = to_start * rest[..., None, :, :]
    is_own_block = np.repeat(np.eye(outer, dtype=bool), inner, axis=0)[:, :, None]
    between = jnp.where(is_own_block, within.reshape(*a.shape, 1, inner), across)
    return SegmentDecays(
        between.reshape(*a.shape, size),
        jnp.exp(inside.to_row + until[..., None]).reshape(a.shape),
        jnp.exp(inside.after + over.after[..., None]).reshape(a.shape),
        jnp.exp(over.total),
    )


class _Sums(NamedTuple):
    """What `SegmentDecays` are the exponentials of."""

    between: Array
    to_row: Array
    after: Array
    total: Array


def _sums(a: Float[Array, "*batch Q"]) -> _Sums:
    """Each sum by itself; about Q cubed additions, for small Q."""
    k = np.arange(a.shape[-1])
    is_inside = (k <= k[:, None, None]) & (k > k[:, None])
    between = jnp.sum(jnp.where(is_inside, a[..., None, None, :], 0), axis=-1)
    to_row = a[..., :1] + between[..., :, 0]
    masked = jnp.where(k[:, None] >= k, between, -jnp.inf)
    return _Sums(masked, to_row, between[..., -1, :], to_row[..., -1])


def _exponentials(sums: _Sums) -> SegmentDecays:
    return SegmentDecays(*(jnp.exp(each) for each in sums))


def _shift(x: Array, first: float, axis: int = -1) -> Array:
    """Moves entries one on along an axis; the last one falls out."""
    size = x.shape[axis] - 1
    kept = jnp.moveaxis(jnp.moveaxis(x, axis, 0)[:size], 0, axis)
    shape = [*x.shape]
    shape[axis] = 1
    return jnp.concatenate([jnp.full(shape, first, x.dtype), kept], axis=axis)


def _block_size(size: int) -> int:
    """The divisor of `size` nearest to its root; the whole where it is small."""
    if size <= 8:
        return size
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d * d - size))
