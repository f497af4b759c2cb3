"""Stacks to plan for, as shapes: blocks that name their values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr

from stackax import Stacked, checkpoint_name
from stackax.transformer import TransformerBlock, TransformerConfig


class Problem(NamedTuple):
    """A loss to differentiate, and its arguments as shapes.

    Attributes:
        loss: From the stack and its input to a scalar.
        stack: The stack.
        x: Its input.
    """

    loss: Callable
    stack: Stacked
    x: Any


class NamedMLP(eqx.Module):
    """A gated residual MLP with four names."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array

    @staticmethod
    def init(key: jax.Array) -> "NamedMLP":
        """Weights (64, 256), twice, and (256, 64)."""
        return NamedMLP(jnp.zeros((64, 256)), jnp.zeros((64, 256)), jnp.zeros((256, 64)))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = checkpoint_name(_norm(x), "norm")
        gate = checkpoint_name(h @ self.gate, "gate")
        up = checkpoint_name(h @ self.up, "up")
        return x + checkpoint_name(jax.nn.silu(gate) * up, "hidden") @ self.down


class Tower(eqx.Module):
    """Eight narrow layers in a row within a block, each with a name and a width of its own."""

    weights: list[jax.Array]

    widths = (64, 96, 48, 160, 32, 128, 80, 112)

    @staticmethod
    def init(key: jax.Array) -> "Tower":
        """A weight into each width, and one back."""
        sizes = (64, *Tower.widths, 64)
        return Tower([jnp.zeros(pair) for pair in zip(sizes, sizes[1:], strict=False)])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x
        for i, weight in enumerate(self.weights[:-1]):
            h = jnp.tanh(checkpoint_name(h @ weight, f"layer_{i}"))
        return x + h @ self.weights[-1]


def transformer() -> Problem:
    """Eight of this library's transformer blocks, seven of whose names are worth keeping."""
    config = TransformerConfig(layers=8, width=64, heads=4, kv_heads=2, vocab_size=1, seq_len=64)
    make = Stacked.init(config.Layers, TransformerBlock)
    stack = eqx.filter_eval_shape(lambda: make(config, key=jr.key(0)))
    x = eqx.filter_eval_shape(lambda: hax.zeros((hax.Axis("batch", 8), config.Pos, config.Embed)))
    return Problem(lambda stack, x: jnp.mean(stack.fold(x).array ** 2), stack, x)


def mlp() -> Problem:
    """Sixteen gated MLPs."""
    return _plain(NamedMLP, 16)


def tower() -> Problem:
    """Twelve towers."""
    return _plain(Tower, 12)


def _plain(block: type, layers: int) -> Problem:
    make = Stacked.init(hax.Axis("layers", layers), block)
    stack = eqx.filter_eval_shape(lambda: make(jr.key(0)))
    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    return Problem(lambda stack, x: jnp.mean(stack.fold(x) ** 2), stack, x)


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
