"""Loops written by hand: the plain Python loop, and `jax.lax.scan` over the same blocks."""

import haliax as hax
import jax
import jax.numpy as jnp

from tests.zoo import Inputs, step


def python_loop(blocks: list, x: Inputs, *, scans: bool, reverse: bool = False):
    """The loop that every other loop has to equal.

    Args:
        blocks: one block per layer.
        x: the inputs; `x.scale` has the axis `layers`.
        scans: whether a block returns `(carry, outputs)`.
        reverse: whether the last layer runs first.

    Returns:
        `(carry, outputs)`; outputs are stacked in the order of the layers, `None` for a fold.
    """
    carry, outputs = x.carry, [None] * len(blocks)
    order = reversed(range(len(blocks))) if reverse else range(len(blocks))
    for i in order:
        result = step(blocks[i], carry, x.scale["layers", i], x.shift, closed=x.closed)
        carry, outputs[i] = result if scans else (result, None)
    return carry, stack_trees(outputs) if scans else None


def stack_trees(trees: list):
    """Stacks equal trees leaf by leaf: named leaves on the axis `layers`, plain ones in front."""

    def stack_leaf(*leaves):
        if isinstance(leaves[0], hax.NamedArray):
            return hax.stack(hax.Axis("layers", len(leaves)), leaves)
        return jnp.stack(leaves)

    return jax.tree.map(stack_leaf, *trees, is_leaf=lambda x: isinstance(x, hax.NamedArray))


def lax_fold(stacked, carry, *, remat: bool = False, unroll: int | bool = 1):
    """The fold as one would write it without any library; `stacked` has layers in front."""

    def body(carry, block):
        return block(carry), None

    body = jax.checkpoint(body, prevent_cse=False) if remat else body
    return jax.lax.scan(body, carry, stacked, unroll=unroll)[0]
