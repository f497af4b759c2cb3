"""What the SSD operation costs, forward and backward, against mamba2-jax.

T=2048, batch 1, 16 heads of 64, state 128, one group, float32. Operations run in turn in one
process; a ratio is the peer's median over ours, so above 1 we are better. The peer runs at its
default chunk, 256, and with the suffix _vs_best_chunk at whichever of 32, 64, 128 and 256 is best
for it in that figure; ours at its default.

forward_speedup               the forward pass
step_speedup                  forward and backward pass
temp_ratio                    temporary bytes of forward and backward pass
forward_temp_ratio            temporary bytes of the forward pass
"""

import jax
import jax.numpy as jnp
import numpy as np
from mamba2_jax.modeling import ssd_forward
from report import run
from turns import compiled, median_seconds

from stackax.mamba2 import ssd

LENGTH, HEADS, HEAD_DIM, STATE = 2048, 16, 64, 128
DEFAULT_CHUNK = 256
PEER_CHUNKS = (32, 64, 128, 256)


def ours(x, dt, A, B, C, D, dt_bias):
    """Our operation."""
    return ssd(x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True)[0]


def peer(chunk: int):
    """The peer's, with B and C expanded over the heads as its own mixer does."""

    def operation(x, dt, A, B, C, D, dt_bias):
        shape = (*x.shape[:3], B.shape[-1])
        B, C = (jnp.broadcast_to(each, shape) for each in (B, C))
        return ssd_forward(x, dt, A, B, C, chunk, D, dt_bias, 0.0, float("inf"))[0]

    return operation


def inputs() -> tuple[jax.Array, ...]:
    """Random inputs, with steps and rates as a model starts with them."""
    rng = np.random.default_rng(0)
    steps = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), HEADS))
    arrays = (
        rng.normal(size=(1, LENGTH, HEADS, HEAD_DIM)),
        rng.normal(size=(1, LENGTH, HEADS)),
        -rng.uniform(1, 16, HEADS),
        rng.normal(size=(1, LENGTH, 1, STATE)),
        rng.normal(size=(1, LENGTH, 1, STATE)),
        np.ones(HEADS),
        steps + np.log(-np.expm1(-steps)),
    )
    return tuple(jnp.asarray(array, jnp.float32) for array in arrays)


def measure(rounds: int = 9) -> dict[str, float]:
    """All figures."""
    jax.config.update("jax_enable_compilation_cache", False)
    args = inputs()
    operations = {"ours": ours} | {f"peer {chunk}": peer(chunk) for chunk in PEER_CHUNKS}
    kinds = {"forward": lambda f: f, "step": _value_and_gradients}
    figures: dict[str, float] = {}
    for kind, make in kinds.items():
        programs = {name: compiled(make(f), *args) for name, f in operations.items()}
        runs = {name: lambda p=p: p(*args) for name, p in programs.items()}
        figures |= _ratios(f"{kind}_speedup", median_seconds(runs, rounds))
        temp = {n: p.memory_analysis().temp_size_in_bytes for n, p in programs.items()}
        figures |= _ratios("temp_ratio" if kind == "step" else "forward_temp_ratio", temp)
    return figures


def _value_and_gradients(operation):
    def loss(*args):
        return jnp.sum(jnp.square(operation(*args)))

    return jax.value_and_grad(loss, argnums=tuple(range(7)))


def _ratios(name: str, costs: dict[str, float]) -> dict[str, float]:
    best = min(cost for peer_name, cost in costs.items() if peer_name != "ours")
    return {
        name: costs[f"peer {DEFAULT_CHUNK}"] / costs["ours"],
        f"{name}_vs_best_chunk": best / costs["ours"],
    }


if __name__ == "__main__":
    run(__doc__, measure)
