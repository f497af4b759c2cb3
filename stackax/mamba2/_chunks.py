"""State space duality, one block of chunks at a time, over one sequence.

Letters: c chunks of Q tokens; G groups of R heads, P features a head; N entries of the state.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._segment_decays import segment_decays


class Chunks(NamedTuple):
    """The inputs of some chunks; `x`, `B` and `C` in the operands' dtype, the rest in float32."""

    x: Float[Array, "c Q G R P"]
    dt: Float[Array, "c Q G R"]
    log_decay: Float[Array, "c Q G R"]
    B: Float[Array, "c Q G N"]
    C: Float[Array, "c Q G N"]


def run_chunks(
    state: Float[Array, "G R P N"], chunks: Chunks, D: Float[Array, "G R P"] | None
) -> tuple[Float[Array, "G R P N"], Float[Array, "c Q G R P"]]:
    r"""The state behind a block of chunks and the outputs of its tokens.

    Per head, with \(a_k\) the log-decays and sums inside the chunk,
    \(y_l = \sum_{s \le l} e^{\sum_{s<k\le l} a_k} (C_l \cdot B_s) \Delta_s x_s
    + e^{\sum_{k \le l} a_k} h C_l + D x_l\) and
    \(h' = e^{\sum_k a_k} h + \sum_s e^{\sum_{k>s} a_k} \Delta_s\, x_s \otimes B_s\).

    Args:
        state: The state before the block, in float32.
        chunks: The block's inputs.
        D: The skip, or None.

    Returns:
        The state after it, and the outputs in the dtype of `x`.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2._chunks import Chunks, run_chunks
        >>> x, steps, B = jnp.ones((3, 8, 2, 4, 5)), jnp.ones((3, 8, 2, 4)), jnp.ones((3, 8, 2, 6))
        >>> state, y = run_chunks(jnp.zeros((2, 4, 5, 6)), Chunks(x, steps, -steps, B, B), None)
        >>> state.shape, y.shape
        ((2, 4, 5, 6), (3, 8, 2, 4, 5))
    """
    x, dt, log_decay, B, C = chunks
    narrow, wide = x.dtype, state.dtype
    decays = segment_decays(jnp.moveaxis(log_decay, 1, -1))

    # Inside a chunk. Heads come first, as the batch of a product: several times faster on a CPU.
    scores = jnp.einsum("clgn,csgn->cgls", C, B, preferred_element_type=wide)[:, :, None]
    weights = (scores * decays.between * jnp.moveaxis(dt, 1, -1)[..., None, :]).astype(narrow)
    by_head = jnp.moveaxis(x, 1, -2)
    y = jnp.einsum("cgrls,cgrsp->cgrlp", weights, by_head, preferred_element_type=wide)

    # From chunk to chunk.
    added = x * (dt * jnp.moveaxis(decays.after_column, -1, 1))[..., None]
    states = jnp.einsum("csgrp,csgn->cgrpn", added.astype(narrow), B, preferred_element_type=wide)
    state, before = _pass_on(state, states, log_decay, decays.total)
    read = jnp.einsum("clgn,cgrpn->clgrp", C, before.astype(narrow), preferred_element_type=wide)
    y = jnp.moveaxis(y, -2, 1) + jnp.moveaxis(decays.to_row, -1, 1)[..., None] * read
    return state, (y if D is None else y + D * x).astype(narrow)


def _pass_on(state, states, log_decay, decay) -> tuple[Array, Array]:
    """The state behind all chunks, and before each: a recurrence over the block's few chunks.

    Args:
        state: Before the first chunk, (G, R, P, N).
        states: What each chunk adds to it, (c, G, R, P, N).
        log_decay: Of each token, (c, Q, G, R).
        decay: Of each chunk, (c, G, R).
    """
    if len(states) == 1:
        return decay[0, ..., None, None] * state + states[0], state[None]
    chunks = segment_decays(jnp.moveaxis(jnp.sum(log_decay, axis=1), 0, -1))
    after = jnp.einsum("grij,jgrpn->igrpn", chunks.between, states)
    after = after + jnp.moveaxis(chunks.to_row, -1, 0)[..., None, None] * state
    return after[-1], jnp.concatenate([state[None], after[:-1]])
