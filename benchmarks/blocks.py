"""The blocks that the benchmarks stack: plain Equinox modules, with Haliax's `init` beside them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

MEBIBYTE = 2**20


class MLP(eqx.Module):
    """A residual MLP on a carry of 2 MiB, (2048, 256) in float32, with a hidden layer of 1024."""

    into: jax.Array
    out: jax.Array

    carry_shape = (2048, 256)

    @staticmethod
    def init(key: jax.Array) -> "MLP":
        """Weights (256, 1024) and (1024, 256)."""
        keys = jr.split(key)
        return MLP(_weights(keys[0], 256, 1024), _weights(keys[1], 1024, 256))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.gelu(x @ self.into) @ self.out


class Transformer(eqx.Module):
    """A pre-norm block, 4 heads of 64, on a carry of 1 MiB: batch 4, sequence 256, width 256."""

    qkv: jax.Array
    projection: jax.Array
    into: jax.Array
    out: jax.Array
    attention_norm: jax.Array
    mlp_norm: jax.Array

    carry_shape = (4, 256, 256)

    @staticmethod
    def init(key: jax.Array) -> "Transformer":
        """3 MiB of weights."""
        keys = jr.split(key, 4)
        return Transformer(
            qkv=_weights(keys[0], 256, 768),
            projection=_weights(keys[1], 256, 256),
            into=_weights(keys[2], 256, 1024),
            out=_weights(keys[3], 1024, 256),
            attention_norm=jnp.ones(256),
            mlp_norm=jnp.ones(256),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = _rms_norm(x, self.attention_norm) @ self.qkv
        q, k, v = (part.reshape(*x.shape[:2], 4, 64) for part in jnp.split(qkv, 3, axis=-1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + attended @ self.projection
        return x + jax.nn.gelu(_rms_norm(x, self.mlp_norm) @ self.into) @ self.out


def carry_bytes(block: type) -> int:
    """The bytes of a block's carry."""
    return 4 * jnp.prod(jnp.array(block.carry_shape)).item()


def _weights(key: jax.Array, rows: int, columns: int) -> jax.Array:
    return 0.02 * jr.normal(key, (rows, columns))


def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight
