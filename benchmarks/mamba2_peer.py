"""Two Mamba-2 models with the same weights: ours, and mamba2-jax's, and what each of them does.

Every function takes the model's arrays first, so that it can be compiled for shapes alone. Batch 1.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import mamba2_jax
from flax import nnx

from stackax.lm import Decoder, next_token_loss
from stackax.mamba2 import Mamba2Config


class Model(NamedTuple):
    """A model's arrays, and its programs.

    Args:
        arrays: What the programs take first: arrays or their shapes.
        logits: (arrays, tokens (1, T)) -> logits of the last token.
        loss: (arrays, tokens (1, T)) -> the mean loss; its gradient is that of `arrays`.
        prefill: (arrays, tokens) -> the last logits and the cache.
        step: (arrays, token (1,), cache) -> logits (1, vocab) and the cache.
    """

    arrays: object
    logits: Callable
    loss: Callable
    prefill: Callable
    step: Callable


def ours(config: Mamba2Config, *, remat=False, abstract: bool = False) -> Model:
    """Our model.

    Args:
        config: The sizes.
        remat: What the backward pass keeps of each layer.
        abstract: Whether the arrays are shapes only.
    """
    make = jax.eval_shape if abstract else lambda f: f()
    decoder = make(lambda: Decoder.init(config, key=jr.key(0), gradient_checkpointing=remat))
    arrays, static = eqx.partition(decoder, lambda x: hasattr(x, "dtype"))

    def tokens_of(tokens):
        return hax.named(tokens, ("batch", "position"))

    def logits(arrays, tokens):
        decoder = eqx.combine(arrays, static)
        hidden = decoder.hidden(tokens_of(tokens))
        return decoder.unembed(hidden["position", -1]).array

    def loss(arrays, tokens):
        # A next token is a target only: one more makes as many inputs as the peer has.
        more = jnp.concatenate([tokens, tokens[:, :1]], axis=1)
        return next_token_loss(eqx.combine(arrays, static), tokens_of(more))

    def prefill(arrays, tokens):
        decoder = eqx.combine(arrays, static)
        cache = decoder.init_cache([hax.Axis("batch", tokens.shape[0])])
        hidden, cache = decoder.prefill(tokens_of(tokens), cache)
        return decoder.unembed(hidden["position", -1]).array, cache

    def step(arrays, token, cache):
        decoder = eqx.combine(arrays, static)
        hidden, cache = decoder.step(hax.named(token, "batch"), cache)
        return decoder.unembed(hidden).array, cache

    return Model(arrays, logits, loss, prefill, step)


def peer(config: Mamba2Config, chunk: int, *, abstract: bool = False) -> Model:
    """The peer's model, with the weights of `ours(config)`."""
    peer_config = mamba2_jax.Mamba2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        state_size=config.state,
        head_dim=config.head_dim,
        chunk_size=chunk,
        conv_kernel=config.conv_width,
        num_hidden_layers=config.layers,
        layer_norm_epsilon=config.norm_eps,
    )
    shapes = nnx.eval_shape(lambda: mamba2_jax.Mamba2ForCausalLM(peer_config, rngs=nnx.Rngs(0)))
    graph, arrays = nnx.split(shapes)
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    if not abstract:
        arrays = _with_weights(arrays, ours(config).arrays)

    def call(arrays, tokens, cache=None, labels=None):
        return nnx.merge(graph, arrays)(tokens, labels=labels, cache=cache)

    def logits(arrays, tokens):
        return call(arrays, tokens)["logits"][:, -1]

    def loss(arrays, tokens):
        return call(arrays, tokens, labels=tokens)["loss"]

    def prefill(arrays, tokens):
        cache = mamba2_jax.create_empty_cache(peer_config, tokens.shape[0])
        out = call(arrays, tokens, cache)
        return out["logits"][:, -1], out["cache"]

    def step(arrays, token, cache):
        out = call(arrays, token[:, None], cache)
        return out["logits"][:, -1], out["cache"]

    return Model(arrays, logits, loss, prefill, step)


def decode_loop(model: Model, count: int) -> Callable:
    """(arrays, token, cache) -> `count` greedy tokens, in one compiled loop."""

    def loop(arrays, token, cache):
        def add(carry, _):
            token, cache = carry
            logits, cache = model.step(arrays, token, cache)
            token = jnp.argmax(logits, axis=-1).astype(token.dtype)
            return (token, cache), token

        return jax.lax.scan(add, (token, cache), length=count)[1]

    return loop


def _with_weights(arrays, decoder):
    """The peer's arrays, with the values of ours."""
    block = decoder.stack.stacked
    mixer = block.mixer

    def layer(index):
        take = lambda named: named.array[index]  # noqa: E731
        return {
            ("norm", "weight"): take(block.norm.weight),
            ("mixer", "in_proj", "kernel"): take(mixer.in_proj.weight).T,
            ("mixer", "conv1d", "conv", "kernel"): take(mixer.conv_weight)[:, None],
            ("mixer", "conv1d", "conv", "bias"): take(mixer.conv_bias),
            ("mixer", "dt_bias"): take(mixer.dt_bias),
            ("mixer", "A_log"): take(mixer.A_log),
            ("mixer", "D"): take(mixer.D),
            ("mixer", "norm", "weight"): take(mixer.norm_weight),
            ("mixer", "out_proj", "kernel"): take(mixer.out_proj.weight).T,
        }

    values = {
        ("backbone", "embedder", "embedding"): decoder.embedding.weight.array,
        ("backbone", "final_norm", "weight"): decoder.norm.weight.array,
    }
    for index in range(len(mixer.D.array)):
        here = ("backbone", "layers", index)
        values |= {here + path: value for path, value in layer(index).items()}

    def value(path, leaf):
        names = tuple(getattr(p, "key", getattr(p, "name", None)) for p in path)
        found = values.pop(tuple(n for n in names if n != "value"))
        assert found.shape == leaf.shape, (names, found.shape, leaf.shape)
        return found

    filled = jax.tree_util.tree_map_with_path(value, arrays)
    assert not values, list(values)
    return filled
