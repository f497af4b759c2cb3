"""Programs that are unlike the grid's: other sizes, other blocks, and loops that are not ours."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
from blocks import MLP, Transformer

import stackax
from stackax.lm import Decoder, next_token_loss
from stackax.transformer import TransformerBlock, TransformerConfig

Program = tuple[Callable, tuple[Any, ...]]


class SwishMlp(eqx.Module):
    """A block of another width (192), ratio (3) and activation, with a layer norm and biases."""

    into: jax.Array
    bias: jax.Array
    out: jax.Array

    @staticmethod
    def init(key: jax.Array) -> "SwishMlp":
        """Weights (192, 576), (576,) and (576, 192)."""
        keys = jr.split(key)
        return SwishMlp(
            jr.normal(keys[0], (192, 576)), jnp.zeros(576), jr.normal(keys[1], (576, 192))
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)
        return x + jax.nn.silu(normed @ self.into + self.bias) @ self.out


class Convolution(eqx.Module):
    """A block with a convolution over the sequence."""

    kernel: jax.Array
    out: jax.Array

    @staticmethod
    def init(key: jax.Array) -> "Convolution":
        """A kernel of 4 positions on 128 channels, and a projection."""
        keys = jr.split(key)
        return Convolution(jr.normal(keys[0], (4, 128, 128)), jr.normal(keys[1], (128, 128)))

    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = jax.lax.conv_general_dilated(
            x, self.kernel, (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC")
        )
        return x + jax.nn.relu(mixed) @ self.out


def programs() -> Iterator[tuple[str, Program]]:
    """Each program with its name."""
    for remat in (False, True):
        yield f"swish MLP, remat={remat}", _ours(SwishMlp, 10, (6, 160, 192), remat)
        yield f"convolution, remat={remat}", _ours(Convolution, 8, (4, 256, 128), remat)
        yield f"lax.scan, remat={remat}", _by_hand(Transformer, 9, (3, 192, 256), remat)
        yield f"haliax Stacked, remat={remat}", _haliax(MLP, 6, (768, 256), remat)
        yield f"softmax head, remat={remat}", _with_head(6, remat)
        yield f"Decoder, remat={remat}", _decoder(6, remat)
    for remat in (False, "minimal", "save_out_proj", stackax.ScanCheckpointPolicy(slots=4)):
        yield f"wide heads, remat={remat}", _other_sizes(14, remat)
    yield "haliax Stacked, nested", _haliax(MLP, 9, (768, 256), "nested")
    yield "Decoder, chunked loss", _decoder(6, True, chunk=32)
    yield "no loop", _unrolled(4)
    yield "no loop, remat", _unrolled(4, remat=True)


def _stack(block: type, layers: int, remat: Any) -> Any:
    init = stackax.Stacked.init(hax.Axis("layers", layers), block, gradient_checkpointing=remat)
    return jax.eval_shape(lambda: init(jr.key(0)))


def _ours(block: type, layers: int, shape: tuple[int, ...], remat: Any) -> Program:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    return lambda stack, x: (stack.fold(x) ** 2).mean(), (_stack(block, layers, remat), x)


def _by_hand(block: type, layers: int, shape: tuple[int, ...], remat: bool) -> Program:
    def loss(blocks, x):
        body = lambda x, block: (block(x), None)  # noqa: E731
        body = jax.checkpoint(body, prevent_cse=False) if remat else body
        return jax.lax.scan(body, x, blocks)[0].sum()

    blocks = jax.eval_shape(lambda: jax.vmap(block.init)(jr.split(jr.key(0), layers)))
    return loss, (blocks, jax.ShapeDtypeStruct(shape, jnp.float32))


def _haliax(block: type, layers: int, shape: tuple[int, ...], remat: Any) -> Program:
    init = hax.nn.Stacked.init(hax.Axis("layers", layers), block, gradient_checkpointing=remat)
    stack = jax.eval_shape(lambda: init(jr.split(jr.key(0), layers)))
    return lambda stack, x: stack.fold(x).sum(), (stack, jax.ShapeDtypeStruct(shape, jnp.float32))


def _with_head(layers: int, remat: Any) -> Program:
    def loss(parameters, x, targets):
        stack, head = parameters
        scores = jax.nn.log_softmax(stack.fold(x) @ head)
        return -jnp.take_along_axis(scores, targets[..., None], -1).mean()

    head = jax.ShapeDtypeStruct((256, 1000), jnp.float32)
    x = jax.ShapeDtypeStruct((2, 128, 256), jnp.float32)
    targets = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    return loss, ((_stack(Transformer, layers, remat), head), x, targets)


def _decoder(layers: int, remat: Any, chunk: int | None = None) -> Program:
    config = TransformerConfig(layers=layers, width=96, heads=4, vocab_size=640, seq_len=128)
    make = lambda: Decoder.init(config, key=jr.key(0), gradient_checkpointing=remat)  # noqa: E731
    tokens = jax.ShapeDtypeStruct((3, 129), jnp.int32)

    def loss(decoder, tokens):
        named = hax.named(tokens, ("batch", "position"))
        return next_token_loss(decoder, named, chunk=chunk)

    return loss, (jax.eval_shape(make), tokens)


def _other_sizes(layers: int, remat: Any) -> Program:
    config = TransformerConfig(
        layers=layers, width=160, heads=2, head_dim=80, mlp_width=640, vocab_size=8, seq_len=192
    )
    init = stackax.Stacked.init(config.Layers, TransformerBlock, gradient_checkpointing=remat)
    stack = jax.eval_shape(lambda: init(config, key=jr.key(0)))
    axes = (hax.Axis("batch", 3), config.Pos, config.Embed)
    x = jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), jnp.float32)
    return lambda stack, x: stack.fold(hax.named(x, axes)).array.sum(), (stack, x)


def _unrolled(layers: int, remat: bool = False) -> Program:
    def loss(blocks, x):
        for block in blocks:
            x = jax.checkpoint(lambda block, x: block(x))(block, x) if remat else block(x)
        return x.sum()

    blocks = jax.eval_shape(lambda: [MLP.init(key) for key in jr.split(jr.key(0), layers)])
    return loss, (blocks, jax.ShapeDtypeStruct((1024, 256), jnp.float32))
