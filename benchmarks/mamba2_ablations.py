"""What each structural condition and precision rule of Mamba-2 is worth: one is left out at a time.

T=1024, batch 1, 16 heads of 64, state 128, one group, float32, unless a line says otherwise. Times
are of programs that run in turn, forward and backward pass; errors are relative, against float64.

sequential_over_chunked      time of a scan over single tokens, over ours
sequential_temp_ratio        its temporary bytes, over ours
expanded_over_grouped        time with B and C repeated for each head, over one group
expanded_temp_ratio          its temporary bytes, over ours
gradient_error               the largest relative error of our gradients; steps of softplus(10)
gradient_error_of_cumsums    the same with differences of cumulative sums for segment sums
nan_with_mask_after_exp      whether gradients are NaN if the triangle is applied to exponentials
decay_error_bfloat16         error of the outputs if log-decays are rounded to bfloat16
state_error_bfloat16         error of the state after 4096 steps if it is kept in bfloat16
norm_error_bfloat16          error of a norm of 1024 features with its variance in bfloat16
norm_error_float32           the same with our norm, on the same bfloat16 features
default_precision_error      error of the logits at the device's default precision of products
residual_error_bfloat16      error of the last logits with a residual stream in bfloat16, 8 layers
residual_error_float32       the same with residual_dtype="float32", blocks in bfloat16
"""

from collections.abc import Callable
from unittest import mock

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from report import run
from turns import compiled, median_seconds

from stackax.lm import Decoder
from stackax.mamba2 import Mamba2Config, _chunks, gated_rms_norm, ssd, ssd_step
from stackax.mamba2._segment_decays import SegmentDecays

LENGTH, HEADS, HEAD_DIM, STATE = 1024, 16, 64, 128


def inputs(length: int, step: float, dtype=np.float32) -> tuple:
    """x, dt, A, B and C; `step` is dt before the softplus, give or take one."""
    rng = np.random.default_rng(0)
    arrays = (
        rng.normal(size=(length, HEADS, HEAD_DIM)),
        np.logaddexp(0, step + rng.normal(size=(length, HEADS))),
        -rng.uniform(1, 16, HEADS),
        rng.normal(size=(length, 1, STATE)) / STATE**0.5,
        rng.normal(size=(length, 1, STATE)),
    )
    return tuple(array.astype(dtype) for array in arrays)


def sequential(x, dt, A, B, C) -> jax.Array:
    """The recurrence, one token at a time."""

    def body(state, token):
        x, dt, B, C = token
        y, state = ssd_step(x, dt, A, B, C, state)
        return state, y

    state = jnp.zeros((*x.shape[1:], B.shape[-1]), x.dtype)
    return jax.lax.scan(body, state, (x, dt, B, C))[1]


def chunked(*args) -> jax.Array:
    """Ours."""
    return ssd(*args)[0]


def expanded(x, dt, A, B, C) -> jax.Array:
    """Ours, with a group for each head."""
    B, C = (jnp.repeat(each, x.shape[1], axis=1) for each in (B, C))
    return ssd(x, dt, A, B, C)[0]


def gradients(f: Callable) -> Callable:
    """All gradients of a weighted sum of the outputs."""

    def loss(*args):
        y = f(*args)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return jax.grad(loss, argnums=tuple(range(5)))


def of_structure(rounds: int) -> dict[str, float]:
    """Conditions on the program."""
    args = inputs(LENGTH, -3.0)
    programs = {f.__name__: compiled(gradients(f), *args) for f in (sequential, chunked, expanded)}
    seconds = median_seconds({n: lambda p=p: p(*args) for n, p in programs.items()}, rounds)
    temp = {n: p.memory_analysis().temp_size_in_bytes for n, p in programs.items()}
    return {
        "sequential_over_chunked": seconds["sequential"] / seconds["chunked"],
        "sequential_temp_ratio": temp["sequential"] / temp["chunked"],
        "expanded_over_grouped": seconds["expanded"] / seconds["chunked"],
        "expanded_temp_ratio": temp["expanded"] / temp["chunked"],
    }


def of_gradients() -> dict[str, float | bool]:
    """How decays over segments are formed."""
    with jax.enable_x64(True):
        exact = gradients(sequential)(*inputs(256, 10.0, np.float64))
        exact = [np.asarray(g) for g in exact]

    def error(found) -> float:
        pairs = zip(found, exact, strict=True)
        return max(float(np.abs(np.asarray(g) - e).max() / np.abs(e).max()) for g, e in pairs)

    args = inputs(256, 10.0)
    figures = {"gradient_error": error(jax.jit(gradients(chunked))(*args))}
    with mock.patch.object(_chunks, "segment_decays", differences):
        figures["gradient_error_of_cumsums"] = error(jax.jit(gradients(chunked))(*args))
    with mock.patch.object(_chunks, "segment_decays", masked_late):
        found = jax.jit(gradients(chunked))(*args)
    return figures | {"nan_with_mask_after_exp": bool(np.isnan(np.asarray(found[1])).any())}


def differences(a) -> SegmentDecays:
    """Decays from differences of cumulative sums."""
    until = jnp.cumsum(a, axis=-1)
    total = until[..., -1]
    static = np.tri(a.shape[-1], dtype=bool)
    between = jnp.where(static, until[..., :, None] - until[..., None, :], -jnp.inf)
    return SegmentDecays(
        *(jnp.exp(each) for each in (between, until, total[..., None] - until, total))
    )


def masked_late(a) -> SegmentDecays:
    """The same, with the triangle applied after the exponential."""
    until = jnp.cumsum(a, axis=-1)
    grown = jnp.exp(until[..., :, None] - until[..., None, :])
    between = jnp.where(np.tri(a.shape[-1], dtype=bool), grown, 0)
    return differences(a)._replace(between=between)


def of_precision() -> dict[str, float]:
    """What bfloat16 costs where Mamba-2 forbids it."""
    args = inputs(4096, -5.0)
    x, dt, A, B, C = args
    with jax.enable_x64(True):
        y, state = map(np.asarray, ssd(*(each.astype(np.float64) for each in args)))
    rounded = np.asarray(jnp.asarray(dt * A).astype(jnp.bfloat16), np.float32)
    # The rounded log-decay, with the step that x enters by left as it was.
    y_rounded = ssd(x * (dt * A / rounded)[..., None], rounded / A, A, B, C)[0]

    def step(state, token):
        x, dt, B, C = token
        state = ssd_step(x, dt, A, B, C, state.astype(jnp.float32))[1]
        return state.astype(jnp.bfloat16), None

    start = jnp.zeros(state.shape, jnp.bfloat16)
    narrow = jax.jit(lambda *xs: jax.lax.scan(step, start, xs)[0])(x, dt, B, C)
    return {
        "decay_error_bfloat16": relative(y_rounded, y),
        "state_error_bfloat16": relative(narrow, state),
        **of_norms(),
        **of_residual_stream(),
    }


def of_norms() -> dict[str, float]:
    """A gated norm, before which the gate is one."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(256, 1024)) * np.exp(rng.normal(size=(256, 1))), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True))
    open_gate = jnp.full(x.shape, 1e3, x.dtype)  # silu(1000) is 1000, which the norm takes out
    ours = gated_rms_norm(x, open_gate, jnp.ones(1024, x.dtype), groups=1, eps=1e-12)
    # Added up in bfloat16, not in float32 as jnp.mean would.
    squares = jax.lax.reduce(x * x, jnp.bfloat16(0), jax.lax.add, (1,))[:, None] / 1024
    narrow = x * jax.lax.rsqrt(squares.astype(jnp.bfloat16))
    return {
        "norm_error_bfloat16": relative(narrow, exact),
        "norm_error_float32": relative(ours, exact),
    }


def of_residual_stream() -> dict[str, float]:
    """A model of 8 layers, of which the blocks compute in bfloat16."""
    sizes = dict(layers=8, width=256, head_dim=64, state=64, vocab_size=256)
    tokens = hax.named(np.random.default_rng(0).integers(0, 256, 512), "position")
    key = jax.random.key(0)

    def logits(dtype, residual_dtype=None):
        config = Mamba2Config(**sizes, residual_dtype=residual_dtype)
        decoder = Decoder.init(config, key=key, dtype=dtype)
        return eqx.filter_jit(decoder)(tokens).array[-1]

    with jax.default_matmul_precision("highest"):
        exact = np.asarray(logits("float32"), np.float64)
    return {
        "default_precision_error": relative(logits("float32"), exact),
        "residual_error_bfloat16": relative(logits("bfloat16"), exact),
        "residual_error_float32": relative(logits("bfloat16", "float32"), exact),
    }


def relative(found, exact: np.ndarray) -> float:
    """The root mean square error over that of the exact values."""
    error = np.asarray(found, np.float64) - exact
    return float(np.sqrt(np.mean(error**2) / np.mean(exact**2)))


def measure(rounds: int = 5) -> dict[str, float | bool]:
    """All figures."""
    return {**of_structure(rounds), **of_gradients(), **of_precision()}


if __name__ == "__main__":
    run(__doc__, measure)
