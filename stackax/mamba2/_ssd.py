"""State space duality over plain arrays: the arithmetic of Mamba-2, without weights."""

import functools as ft
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._policy.lower import checkpoint
from .._policy.policy import ScanCheckpointPolicy
from ._chunks import Chunks, run_chunks
from ._discretise import DtLimit, check_dt_limit, discretise
from ._resets import find_resets
from ._shapes import bind_shapes, require_floating

CHUNK_SIZE = 64
CHUNKS_PER_BLOCK = 1


def ssd(
    x: Float[Array, "*batch T H P"],
    dt: Float[Array, "*batch T H"],
    A: Float[Array, " H"],
    B: Float[Array, "*batch T G N"],
    C: Float[Array, "*batch T G N"],
    *,
    D: Float[Array, " H"] | Float[Array, "H P"] | None = None,
    dt_bias: Float[Array, " H"] | None = None,
    dt_softplus: bool = False,
    dt_limit: DtLimit = (0.0, math.inf),
    initial_state: Float[Array, "*batch H P N"] | None = None,
    mask: Bool[Array, "*batch T"] | None = None,
    segment_ids: Int[Array, "*batch T"] | None = None,
    previous_segment_id: Int[Array, "*batch"] | None = None,
    chunk_size: int | None = None,
    chunks_per_block: int | None = None,
) -> tuple[Float[Array, "*batch T H P"], Float[Array, "*batch H P N"]]:
    r"""Runs the recurrence of Mamba-2 over a sequence, chunk by chunk.

    \(h_t = e^{\Delta_t A} h_{t-1} + \Delta_t\, x_t \otimes B_t\) and \(y_t = h_t C_t + D x_t\) for
    each head, with \(\Delta_t\) from `dt` by bias, softplus and limits, in this order. Head \(h\)
    reads group \(\lfloor h / (H/G) \rfloor\) of `B` and `C`, which are never repeated over heads.

    A chunk is computed as masked matrix products, and states pass from chunk to chunk in a loop.
    The backward pass keeps the states between blocks of chunks and computes all else again, so
    its memory is linear in T. Sequences of any length are padded with steps of 0 to whole chunks,
    which leaves the state as it is.

    Decays are formed from log-decays in float32 whatever the dtype of the inputs (float64 stays
    float64), and so is the state. Products take `x`, `B` and `C` as they are and add up in float32.
    On accelerators, JAX's default precision of float32 products is lower; use
    `jax.default_matmul_precision("highest")` for parity.

    Args:
        x: Inputs: T tokens, H heads of P features.
        dt: Time steps of each head, raw where `dt_softplus` or `dt_bias` is given.
        A: Negative rates of decay.
        B: How inputs enter the state: G groups (a divisor of H), N entries. In the dtype of `x`.
        C: How outputs read it. In the dtype of `x`.
        D: The skip, per head or per channel. None adds none.
        dt_bias: Added to `dt`.
        dt_softplus: Whether `dt` then passes through softplus.
        dt_limit: What `dt` is then clipped to; its gradient is 0 where it is clipped.
        initial_state: The state before the first token. None means zeros.
        mask: True at real tokens. Elsewhere, whether on the left, on the right or in between, the
            state passes unchanged and the output is finite and means nothing. The inputs there
            must be finite.
        segment_ids: The document of each token. Where the id of a real token is not that of the
            real token before it, the state is dropped, exactly, in values and in gradients.
        previous_segment_id: The document that `initial_state` belongs to, where a packed sequence
            is continued. None means the document of the first real token.
        chunk_size: Tokens in a chunk. A knob for speed and memory, as the next; None is a default
            that was chosen by measurement.
        chunks_per_block: Chunks computed at once, between states that are kept for the backward
            pass.

    Returns:
        The outputs, with the shape and dtype of `x`, and the state behind the last token, in
        float32 (float64 where an input is).

    Raises:
        TypeError: if an argument is not an array, or of the wrong kind of dtype.
        ValueError: if shapes do not fit, G does not divide H, `B` or `C` has not the dtype of
            `x`, the limits are out of order, a chunk size is below 1, or
            `previous_segment_id` is given without `segment_ids`.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2 import ssd
        >>> x, dt, A = jnp.ones((5, 4, 8)), jnp.full((5, 4), 0.1), -jnp.ones(4)
        >>> B = C = jnp.ones((5, 2, 16))
        >>> y, state = ssd(x, dt, A, B, C)
        >>> y.shape, state.shape
        ((5, 4, 8), (4, 8, 16))

    References:
        Dao and Gu, Transformers are SSMs, https://arxiv.org/abs/2405.21060, section 6. The formulas
        and arguments are those of `mamba_chunk_scan_combined` in state-spaces/mamba, which
        computes segment sums as differences and lets padding and resets leak.
    """
    sizes = bind_shapes(
        {
            "x": (x, "*batch T H P"),
            "dt": (dt, "*batch T H"),
            "A": (A, "H"),
            "B": (B, "*batch T G N"),
            "C": (C, "*batch T G N"),
            "D": (D, "H" if getattr(D, "ndim", 2) == 1 else "H P"),
            "dt_bias": (dt_bias, "H"),
            "initial_state": (initial_state, "*batch H P N"),
            "mask": (mask, "*batch T"),
            "segment_ids": (segment_ids, "*batch T"),
            "previous_segment_id": (previous_segment_id, "*batch"),
        }
    )
    _check(x, dt, A, B, C, D, dt_bias, initial_state, sizes)
    check_dt_limit(dt_limit)
    _check_knobs(chunk_size, chunks_per_block)
    resets = None
    if segment_ids is not None:
        resets = find_resets(segment_ids, mask, previous_segment_id)
    elif previous_segment_id is not None:
        raise ValueError("previous_segment_id is given, but segment_ids is not: give both")
    dt, log_decay = discretise(
        dt, A, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit, mask=mask, resets=resets
    )
    wide = jnp.promote_types(x.dtype, dt.dtype)
    if initial_state is None:
        H, P, N = sizes["H"], sizes["P"], sizes["N"]
        initial_state = jnp.zeros((*sizes["*batch"], H, P, N), wide)
    run = ft.partial(_run_sequence, D=D, chunk_size=chunk_size, chunks_per_block=chunks_per_block)
    for size in reversed(sizes["*batch"]):
        run = jax.vmap(run) if size != 1 else _as_one(run)
    y, state = run(x, dt.astype(wide), log_decay.astype(wide), B, C, initial_state.astype(wide))
    return y, state


def ssd_step(
    x: Float[Array, "*batch H P"],
    dt: Float[Array, "*batch H"],
    A: Float[Array, " H"],
    B: Float[Array, "*batch G N"],
    C: Float[Array, "*batch G N"],
    state: Float[Array, "*batch H P N"],
    *,
    D: Float[Array, " H"] | Float[Array, "H P"] | None = None,
    dt_bias: Float[Array, " H"] | None = None,
    dt_softplus: bool = False,
    dt_limit: DtLimit = (0.0, math.inf),
    mask: Bool[Array, " *batch"] | None = None,
) -> tuple[Float[Array, "*batch H P"], Float[Array, "*batch H P N"]]:
    """One token of `ssd`: decays the state, adds the token, and reads it.

    Args:
        x: The token's inputs.
        dt: Its time steps.
        A: As in `ssd`.
        B: How it enters the state.
        C: How it reads it.
        state: The state before it.
        D: As in `ssd`.
        dt_bias: As in `ssd`.
        dt_softplus: As in `ssd`.
        dt_limit: As in `ssd`.
        mask: False for sequences whose state passes unchanged; their output means nothing.

    Returns:
        The output in the dtype of `x`, and the state after the token in float32 (float64 where an
        input is).

    Raises:
        TypeError: if an argument is not an array, or of the wrong kind of dtype.
        ValueError: as in `ssd`.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2 import ssd_step
        >>> x, dt, A = jnp.ones((4, 8)), jnp.full(4, 0.1), -jnp.ones(4)
        >>> B = C = jnp.ones((2, 16))
        >>> y, state = ssd_step(x, dt, A, B, C, jnp.zeros((4, 8, 16)))
        >>> y.shape, state.shape
        ((4, 8), (4, 8, 16))
    """
    sizes = bind_shapes(
        {
            "x": (x, "*batch H P"),
            "dt": (dt, "*batch H"),
            "A": (A, "H"),
            "B": (B, "*batch G N"),
            "C": (C, "*batch G N"),
            "D": (D, "H" if getattr(D, "ndim", 2) == 1 else "H P"),
            "dt_bias": (dt_bias, "H"),
            "state": (state, "*batch H P N"),
            "mask": (mask, "*batch"),
        }
    )
    _check(x, dt, A, B, C, D, dt_bias, state, sizes)
    check_dt_limit(dt_limit)
    dt, log_decay = discretise(
        dt, A, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit, mask=mask, resets=None
    )
    wide = jnp.promote_types(x.dtype, dt.dtype)
    heads_per_group = sizes["H"] // sizes["G"]
    B, C = (jnp.repeat(each.astype(wide), heads_per_group, axis=-2) for each in (B, C))
    added = (dt[..., None] * x)[..., None] * B[..., None, :]
    state = jnp.exp(log_decay)[..., None, None] * state.astype(wide) + added
    y = jnp.sum(state * C[..., None, :], axis=-1)
    if D is not None:
        y = y + _per_channel(D, wide) * x
    return y.astype(x.dtype), state


def _as_one(run):
    """`jax.vmap(run)` for an axis of one, without the copies that bring chunks to the front."""

    def squeezed(*arrays):
        return [out[None] for out in run(*(array[0] for array in arrays))]

    return squeezed


def _run_sequence(x, dt, log_decay, B, C, state, *, D, chunk_size, chunks_per_block):
    """`ssd` of one sequence, discretised: a scan over blocks of chunks, its body rematerialised."""
    (T, H, P), G = x.shape, B.shape[1]
    R = H // G
    size, per_block, blocks = _partition(T, chunk_size, chunks_per_block)
    if D is not None:
        D = jnp.broadcast_to(_per_channel(D, state.dtype), (H, P)).reshape(G, R, P)

    def in_blocks(array):
        padding = [(0, blocks * per_block * size - T), (0, 0)]
        return jnp.pad(array.reshape(T, -1), padding).reshape(blocks, per_block * size, -1)

    def run_block(state, blocked):
        x, dt, log_decay, B, C = (part.reshape(per_block, size, G, -1) for part in blocked)
        chunks = Chunks(x.reshape(*x.shape[:3], R, P), dt, log_decay, B, C)
        state, y = run_chunks(state, chunks, D)
        return state, y.reshape(per_block * size, H * P)

    # The carry is the state, (G, R, P, N) in float32: all that is kept of a block. Its inputs and
    # outputs have no axes of one, for which XLA invents layouts, and copies (jax 0.10).
    body = checkpoint(
        run_block, ScanCheckpointPolicy(), carry_name="ssd_state", prevent_cse=blocks == 1
    )
    blocked = [in_blocks(part) for part in (x, dt, log_decay, B, C)]
    state, y = jax.lax.scan(body, state.reshape(G, R, *state.shape[1:]), blocked)
    return y.reshape(-1, H, P)[:T], state.reshape(H, *state.shape[2:])


def _partition(T: int, chunk_size: int | None, chunks_per_block: int | None):
    """Tokens in a chunk, chunks in a block, and blocks, none of them longer than it must be."""
    needed = T if T <= 8 else 8 * math.ceil(T / 8)
    size = max(1, min(CHUNK_SIZE if chunk_size is None else chunk_size, needed))
    chunks = max(1, math.ceil(T / size))
    per_block = CHUNKS_PER_BLOCK if chunks_per_block is None else chunks_per_block
    blocks = math.ceil(chunks / per_block)
    return size, math.ceil(chunks / blocks), blocks


def _per_channel(D: Array, dtype) -> Array:
    D = D.astype(dtype)
    return D[:, None] if D.ndim == 1 else D


def _check(x, dt, A, B, C, D, dt_bias, state, sizes) -> None:
    require_floating(x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=dt_bias, state=state)
    if sizes["H"] % sizes["G"]:
        raise ValueError(
            f"x has {sizes['H']} heads, which is not a multiple of the {sizes['G']} groups of B"
        )
    for name, array in (("B", B), ("C", C)):
        if array.dtype != x.dtype:
            raise ValueError(f"{name} has dtype {array.dtype}, but x has {x.dtype}: cast one")


def _check_knobs(chunk_size: int | None, chunks_per_block: int | None) -> None:
    for name, value in (("chunk_size", chunk_size), ("chunks_per_block", chunks_per_block)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1: give None for the default")
