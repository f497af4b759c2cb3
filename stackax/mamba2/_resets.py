"""Where documents begin in a packed sequence, read from its segment ids."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def find_resets(
    segment_ids: Int[Array, "*batch T"],
    mask: Bool[Array, "*batch T"] | None,
    previous_segment_id: Int[Array, "*batch"] | None,
) -> Bool[Array, "*batch T"]:
    """True at the first token of each document but the one that the sequence continues.

    Only real tokens are compared, each with the real token before it, so padding may have any id.

    Args:
        segment_ids: The document of each token, any integers.
        mask: True at real tokens; None where all are.
        previous_segment_id: The document of the last real token before the sequence. None says
            that the sequence continues whatever its first real token belongs to.

    Returns:
        Where what was remembered is dropped; False at padding.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2._resets import find_resets
        >>> find_resets(jnp.array([7, 7, 9]), None, None).tolist()
        [False, False, True]
    """
    before = _ids_before(segment_ids, mask)
    is_first = before[1] < 0
    if previous_segment_id is None:
        return ~is_first & (segment_ids != before[0]) & _or_true(mask)
    ids_before = jnp.where(is_first, jnp.expand_dims(previous_segment_id, -1), before[0])
    return (segment_ids != ids_before) & _or_true(mask)


def _ids_before(segment_ids, mask) -> tuple[Array, Array]:
    """The id of the real token before each position, and that token's position or -1."""
    positions = jnp.broadcast_to(jnp.arange(segment_ids.shape[-1]), segment_ids.shape)
    if mask is not None:
        positions = jnp.where(mask, positions, -1)
    latest = jax.lax.cummax(positions, axis=positions.ndim - 1)
    before = jnp.pad(latest, [(0, 0)] * (latest.ndim - 1) + [(1, 0)], constant_values=-1)[..., :-1]
    return jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=-1), before


def _or_true(mask):
    return True if mask is None else mask
