"""Training steps of a stack, ours and the peers', and how their cost is read."""

from collections.abc import Callable

import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from turns import median_seconds

import stackax


def stackax_step(block: type, layers: int, remat) -> tuple[Callable, Callable]:
    """Our stack's value_and_grad of a sum, and what makes its parameters."""
    axis = hax.Axis("layers", layers)

    def make(key):
        return stackax.Stacked.init(axis, block, gradient_checkpointing=remat)(key)

    return jax.value_and_grad(lambda stack, x: stack.fold(x).sum()), make


def haliax_step(block: type, layers: int, remat) -> tuple[Callable, Callable]:
    """Haliax's stack, likewise."""
    axis = hax.Axis("layers", layers)

    def make(key):
        keys = jr.split(key, layers)
        return hax.nn.Stacked.init(axis, block, gradient_checkpointing=remat)(keys)

    return jax.value_and_grad(lambda stack, x: stack.fold(x).sum()), make


def lax_step(block: type, layers: int, *, remat: bool) -> tuple[Callable, Callable]:
    """A hand-written `jax.lax.scan` over the same block, likewise."""

    def loss(blocks, x):
        def body(x, block):
            return block(x), None

        if remat:
            body = jax.checkpoint(body, prevent_cse=False)
        return jax.lax.scan(body, x, blocks)[0].sum()

    def make(key):
        return jax.vmap(block.init)(jr.split(key, layers))

    return jax.value_and_grad(loss), make


def compiled(block: type, step: Callable, make: Callable) -> jax.stages.Compiled:
    """The step, compiled for shapes alone: nothing is allocated."""
    step, *shapes = with_shapes(block, step, make)
    return jax.jit(step).lower(*shapes).compile()


def with_shapes(block: type, step: Callable, make: Callable) -> tuple:
    """The step, and its arguments as shapes."""
    return step, jax.eval_shape(make, jr.key(0)), _carry(block)


def temp_bytes(block: type, step: Callable, make: Callable) -> int:
    """The compiler's figure for temporary memory."""
    return compiled(block, step, make).memory_analysis().temp_size_in_bytes


def median_ratio(block: type, ours: tuple, peer: tuple, rounds: int) -> float:
    """The time of our step over the peer's: both run in turn, and medians are divided.

    Args:
        block: The block.
        ours: A step and what makes its parameters.
        peer: Likewise.
        rounds: How often each is run.
    """
    runs = {"ours": _runner(block, *ours), "peer": _runner(block, *peer)}
    seconds = median_seconds(runs, rounds)
    return seconds["ours"] / seconds["peer"]


def _runner(block: type, step: Callable, make: Callable) -> Callable[[], object]:
    run = compiled(block, step, make)
    draw = np.random.default_rng(0)

    def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(0.02 * draw.standard_normal(leaf.shape), leaf.dtype)

    # Drawn by NumPy: to compile JAX's draws takes longer than to compile the step.
    stack, x = jax.tree.map(filled, (jax.eval_shape(make, jr.key(0)), _carry(block)))
    return lambda: run(stack, x)


def _carry(block: type) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(block.carry_shape, jnp.float32)
