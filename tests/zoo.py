"""The registry that the laws run over: blocks, policies, lengths and containers.

A new block, policy or container is a new row here; the laws under `tests/laws/` do the rest.

Axes and shapes: `Layers` is the stack; a carry is (batch 2, embed 4) for the MLP blocks and
(batch 2, pos 3, embed 4) for the attention and Mamba-2 blocks. Everything is tiny, because a law
costs one compilation per program and nothing else.

Every block is called as `block(carry, scale, shift)`: `scale` is a per-layer argument in the laws,
`shift` a shared one. A block ends in `carry + scale * gain * last + shift` with a learned `gain`,
so that its last name is a residual and no policy that names it warns.
"""

import contextlib
import dataclasses
import functools as ft
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr

from stackax import (
    BlockSeq,
    ScanCheckpointPolicy,
    Stacked,
    checkpoint_name,
)
from stackax.mamba2 import Mamba2Block, Mamba2Config

VOCABULARY_NAMES = ("query_proj", "context", "out_proj", "mlpwi", "mlpwo")

BATCH, POS, EMBED, HIDDEN, HEADS = 2, 3, 4, 8, 2

Batch = hax.Axis("batch", BATCH)
Pos = hax.Axis("position", POS)
Embed = hax.Axis("embed", EMBED)
Hidden = hax.Axis("hidden", HIDDEN)

LENGTHS = (1, 2, 5, 8)
CONTAINERS = (Stacked, BlockSeq)


def layers(n: int) -> hax.Axis:
    """The layers' axis of a stack of n."""
    return hax.Axis("layers", n)


# Blocks


@ft.partial(jax.jit, static_argnums=range(1, 11))
def draw(key, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Arrays of these shapes, uniform between 0 and 1 but for matrices, which have a mean of 0.

    Compiled as a whole: a draw for each array would cost the tests minutes.
    """
    sizes = [math.prod(shape) for shape in shapes]
    numbers = jr.uniform(key, (sum(sizes),))
    bounds = list(itertools.accumulate(sizes[:-1]))
    parts = [
        part.reshape(shape) for part, shape in zip(jnp.split(numbers, bounds), shapes, strict=True)
    ]
    return [part - 0.5 if part.ndim > 1 else part for part in parts]


class NamedMlp(eqx.Module):
    """An MLP of NamedArrays only; names `mlpwi` and `mlpwo`."""

    up: hax.NamedArray
    down: hax.NamedArray
    gain: hax.NamedArray

    @staticmethod
    def init(*, key):
        up, down, gain = draw(key, (EMBED, HIDDEN), (HIDDEN, EMBED), ())
        return NamedMlp(
            up=hax.named(up, (Embed, Hidden)),
            down=hax.named(down, (Hidden, Embed)),
            gain=hax.named(gain, ()),
        )

    def __call__(self, x, scale=1.0, shift=0.0):
        hidden = hax.tanh(checkpoint_name(hax.dot(x, self.up, axis=Embed), "mlpwi"))
        last = checkpoint_name(hax.dot(hidden, self.down, axis=Hidden), "mlpwo")
        return x + last * self.gain * scale + shift


class PlainMlp(eqx.Module):
    """The same MLP of plain arrays, made by `__init__` like any Equinox module."""

    up: jax.Array
    down: jax.Array
    gain: jax.Array

    def __init__(self, embed: int = EMBED, hidden: int = HIDDEN, *, key):
        self.up, self.down, self.gain = draw(key, (embed, hidden), (hidden, embed), ())

    def __call__(self, x, scale=1.0, shift=0.0):
        hidden = jnp.tanh(checkpoint_name(x @ self.up, "mlpwi"))
        last = checkpoint_name(hidden @ self.down, "mlpwo")
        return x + scale * self.gain * last + shift


class Vocabulary(eqx.Module):
    """A product for each of the presets' names: the block to try policies with, cheap to compile.

    Every named value is a factor of a product, so that all of them are residuals.
    """

    weight: hax.NamedArray

    @staticmethod
    def init(*, key):
        return Vocabulary(hax.named(draw(key, (EMBED,))[0], Embed))

    def __call__(self, x, scale=1.0, shift=0.0):
        y = bounded = hax.sin(x)
        for name in VOCABULARY_NAMES:
            y = checkpoint_name(y * self.weight, name) * bounded
        return x + y * scale + shift


class MixedMlp(eqx.Module):
    """A NamedArray beside a plain array, a Python scalar, a function and a `None`."""

    weight: hax.NamedArray
    gain: jax.Array
    power: float
    nonlinearity: Callable
    absent: None

    @staticmethod
    def init(*, key):
        weight, gain = draw(key, (EMBED, EMBED), ())
        weight = hax.named(weight, (Embed, Embed.alias("out")))
        return MixedMlp(weight, gain, 0.5, hax.tanh, None)

    def __call__(self, x, scale=1.0, shift=0.0):
        hidden = self.nonlinearity(hax.dot(x, self.weight, axis=Embed))
        last = checkpoint_name(hidden.rename({"out": "embed"}), "mlpwi")
        return x + last * last * self.gain * self.power * scale + shift


class Wave(eqx.Module):
    """One sine: the block to try loops and schedules with."""

    weight: hax.NamedArray

    @staticmethod
    def init(*, key):
        return Wave(hax.named(draw(key, (EMBED,))[0], Embed))

    def __call__(self, x, scale=1.0, shift=0.0):
        return x + hax.sin(x * self.weight) * scale + shift


class Recording(eqx.Module):
    """A block for scan: returns the carry, and outputs that are named, plain and integer."""

    inner: Wave

    @staticmethod
    def init(*, key):
        return Recording(Wave.init(key=key))

    def __call__(self, x, scale=1.0, shift=0.0):
        y = self.inner(x, scale, shift)
        outputs = {
            "mean": hax.mean(y * y, Embed),
            "first": y.array[0],
            "sign": jnp.sign(y.array).astype(jnp.int32),
        }
        return y, outputs


class ManyTypes(eqx.Module):
    """Leaves of every kind: float32, bfloat16, int32, bool and a typed key."""

    weight: jax.Array
    low: jax.Array
    counts: jax.Array
    mask: jax.Array
    key: jax.Array

    def __init__(self, *, key):
        self.weight, low, counts, mask = draw(key, (EMBED, EMBED), *[(EMBED,)] * 3)
        self.low, self.mask = low.astype(jnp.bfloat16), mask > 0.5
        self.counts = (4 * counts).astype(jnp.int32)
        self.key = key

    def __call__(self, x, scale=1.0, shift=0.0):
        hidden = checkpoint_name(jnp.tanh(x @ self.weight), "mlpwi")
        kept = jnp.where(self.mask, hidden, 0.5 * hidden) * self.counts
        noise = jr.normal(self.key, x.shape)
        return x + scale * kept * hidden * self.low.astype(jnp.float32) + 0.1 * noise + shift


class Attention(eqx.Module):
    """A pre-norm attention block with a gated MLP in plain arrays, named as MaxText names them."""

    qkv: jax.Array
    out: jax.Array
    up: jax.Array
    gate: jax.Array
    down: jax.Array
    gain: jax.Array
    heads: int = eqx.field(static=True)

    def __init__(self, embed: int = EMBED, hidden: int = HIDDEN, heads: int = HEADS, *, key):
        self.qkv, self.out, self.up, self.gate, self.down, self.gain = draw(
            key,
            (embed, 3, embed),
            (embed, embed),
            (embed, hidden),
            (embed, hidden),
            (hidden, embed),
            (embed,),
        )
        self.heads = heads

    def __call__(self, x, scale=1.0, shift=0.0):
        x = x + checkpoint_name(self.attend(_norm(x, self.gain)), "out_proj")
        h = _norm(x, self.gain)
        up = checkpoint_name(h @ self.up, "mlpwi_0")
        gate = checkpoint_name(h @ self.gate, "mlpwi_1")
        last = checkpoint_name((up * jax.nn.silu(gate)) @ self.down, "mlpwo")
        return x + scale * self.gain * last + shift

    def attend(self, x):
        split = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        q, k, v = (jnp.reshape(x @ self.qkv[:, i], split) for i in range(3))
        q, k, v = (
            checkpoint_name(a, name)
            for a, name in zip((q, k, v), ("query_proj", "key_proj", "value_proj"), strict=True)
        )
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k) * split[-1] ** -0.5
        context = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)
        return checkpoint_name(jnp.reshape(context, x.shape), "context") @ self.out


def _norm(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


MAMBA2 = Mamba2Config(
    layers=2, width=EMBED, head_dim=4, state=2, conv_width=2, vocab_size=8, chunk_size=2
)


class Mamba2(eqx.Module):
    """A Mamba-2 block of two heads, over sequences of a chunk and a half.

    Its weights are drawn as all are here, because its own draws would cost a second each.
    """

    block: Mamba2Block
    gain: hax.NamedArray

    @staticmethod
    def init(*, key):
        like = eqx.filter_eval_shape(Mamba2Block.init, MAMBA2, key=key)
        leaves, treedef = jax.tree.flatten(like)
        *weights, gain = draw(key, *(leaf.shape for leaf in leaves), ())
        return Mamba2(jax.tree.unflatten(treedef, weights), hax.named(gain, ()))

    def __call__(self, x, scale=1.0, shift=0.0):
        last = self.block(x) - x
        return x + last * self.gain * scale + shift


class Affine(eqx.nn.Linear):
    """`eqx.nn.Linear` by inheritance: a class with a positional constructor and no `init`."""

    def __call__(self, x, scale=1.0, shift=0.0):
        hidden = checkpoint_name(jnp.tanh(x @ self.weight.T + self.bias), "mlpwi")
        return x + scale * hidden * hidden + shift


@dataclasses.dataclass(frozen=True)
class Block:
    """A row of the registry: how to make a block, its carry, and the names inside it.

    Attributes:
        name: the row's name in test ids.
        module: what `Stacked.init` takes.
        args: the positional arguments of the module's constructor.
        carry: makes a carry from a key.
        names: the names that the block gives to its values, all of them residuals.
        scans: whether the block returns `(carry, outputs)`.
        tolerance: relative error allowed between two orders of the same float32 sums.
    """

    name: str
    module: Any
    carry: Callable
    names: frozenset[str]
    args: tuple = ()
    scans: bool = False
    tolerance: float = 1e-6

    def stack(self, n: int, policy: Any = False, container: Any = Stacked, seed: int = 0):
        """A container of n blocks under a policy, from one key."""
        make = container.init(layers(n), self.module, gradient_checkpointing=policy)
        return make(*self.args, key=jr.key(seed))

    def layer_list(self, n: int, seed: int = 0) -> list:
        """The same n blocks made one by one, without a container."""
        make = getattr(self.module, "init", self.module)
        return [make(*self.args, key=key) for key in jr.split(jr.key(seed), n)]


def _named_carry(key):
    return hax.named(draw(key, (BATCH, EMBED))[0], (Batch, Embed))


def _plain_carry(key):
    return draw(key, (BATCH, EMBED))[0]


def _sequence_carry(key):
    return draw(key, (BATCH, POS, EMBED))[0]


def _named_sequence_carry(key):
    return hax.named(_sequence_carry(key), (Batch, Pos, Embed))


_ALL = frozenset(VOCABULARY_NAMES)
_MLP = frozenset({"mlpwi", "mlpwo"})
_MAMBA2 = frozenset({"in_proj", "conv", "ssd", "gated_norm", "out_proj"})
_ATTENTION = _ALL - {"mlpwi"} | {"key_proj", "value_proj", "mlpwi_0", "mlpwi_1"}

VOCABULARY = Block("vocabulary", Vocabulary, _named_carry, _ALL)
WAVE = Block("wave", Wave, _named_carry, frozenset())
NAMED_MLP = Block("named_mlp", NamedMlp, _named_carry, _MLP)
PLAIN_MLP = Block("plain_mlp", PlainMlp, _plain_carry, _MLP)
MIXED_MLP = Block("mixed_mlp", MixedMlp, _named_carry, frozenset({"mlpwi"}))
AFFINE = Block("affine", Affine, _plain_carry, frozenset({"mlpwi"}), args=(EMBED, EMBED))
RECORDING = Block("recording", Recording, _named_carry, frozenset(), scans=True)
# The bfloat16 leaf's gradient is rounded to 8 bits: one unit of it is 0.4 %.
MANY_TYPES = Block("many_types", ManyTypes, _plain_carry, frozenset({"mlpwi"}), tolerance=8e-3)
ATTENTION = Block("attention", Attention, _sequence_carry, _ATTENTION)
MAMBA2_BLOCK = Block("mamba2", Mamba2, _named_sequence_carry, _MAMBA2)

BLOCKS = (
    WAVE,
    VOCABULARY,
    NAMED_MLP,
    PLAIN_MLP,
    MIXED_MLP,
    AFFINE,
    RECORDING,
    MANY_TYPES,
    ATTENTION,
    MAMBA2_BLOCK,
)


# Policies


@dataclasses.dataclass(frozen=True)
class Policy:
    """A row of the registry: a policy as a user would write it.

    Attributes:
        name: the row's name in test ids.
        spec: what is given as `gradient_checkpointing=` or `remat=`.
        needs: names of which the block must have at least one.
        scheduled: whether the loop owns its backward pass (slots and nested).
        offloads: whether something goes to the host.
    """

    name: str
    spec: Any
    needs: frozenset[str] = frozenset()
    scheduled: bool = False
    offloads: bool = False

    def fits(self, block: Block) -> bool:
        """Whether the names that the policy asks for occur in the block."""
        return not self.needs or bool(self.needs & block.names)


def _slots(k: int) -> Policy:
    return Policy(f"slots={k}", ScanCheckpointPolicy(slots=k), scheduled=True)


def _nested(segments) -> Policy:
    return Policy(f"nested={segments}", ScanCheckpointPolicy(nested=segments), scheduled=True)


_QKV = frozenset({"query_proj", "key_proj", "value_proj"})
_WIDE = _QKV | {"out_proj", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo"}

NONE = Policy("none", False)
SIMPLE = Policy("simple", True)
NESTED = _nested(True)
SLOTS1, SLOTS2 = _slots(1), _slots(2)
INTERNALS = Policy("internals", ScanCheckpointPolicy(save_block_internals=True))
NAMES = Policy("names", ScanCheckpointPolicy(save_block_internals=["mlpwi"]), frozenset({"mlpwi"}))
OFFLOADED_CARRIES = Policy(
    "offloaded_carries", ScanCheckpointPolicy(save_carries="offload"), offloads=True
)
OFFLOADED_NAMES = Policy(
    "offloaded_names",
    ScanCheckpointPolicy(offload_block_internals=["mlpwi"]),
    frozenset({"mlpwi"}),
    offloads=True,
)
OFFLOADED_SLOTS = Policy(
    "offloaded_slots",
    ScanCheckpointPolicy(slots=1, save_carries="offload"),
    scheduled=True,
    offloads=True,
)

PRESETS = (
    Policy("minimal", "minimal", _WIDE),
    Policy("minimal_with_context", "minimal_with_context", _WIDE | {"context"}),
    Policy("save_dot_except_mlp", "save_dot_except_mlp", _QKV | {"out_proj"}),
    Policy(
        "save_dot_with_context_except_mlp",
        "save_dot_with_context_except_mlp",
        _QKV | {"out_proj", "context"},
    ),
    Policy("save_dot_except_mlpwi", "save_dot_except_mlpwi", _QKV | {"out_proj", "mlpwo"}),
    Policy("save_qkv_proj", "save_qkv_proj", _QKV),
    Policy("save_out_proj", "save_out_proj", frozenset({"out_proj"})),
    Policy("qkv_proj_offloaded", "qkv_proj_offloaded", _QKV, offloads=True),
    Policy("minimal_offloaded", "minimal_offloaded", _WIDE, offloads=True),
)

# One policy per loop that has remat: what every block is tried with, in stacks of two layers.
CORE_POLICIES = (SIMPLE, SLOTS1)


def schedules(n: int) -> tuple[Policy, ...]:
    """Every way to keep only some of n carries."""
    slots = tuple(_slots(k) for k in sorted({1, 2, 3, n, n + 3} if n > 3 else {1, n + 3}))
    nested = (_nested(2), _nested((2, 2))) if n > 3 else ()
    return slots + (NESTED, *nested)


def policies(n: int) -> tuple[Policy, ...]:
    """Every policy worth trying on n layers; aliases are other words for some of them."""
    fields = (NONE, SIMPLE, INTERNALS, NAMES, OFFLOADED_CARRIES, OFFLOADED_NAMES, OFFLOADED_SLOTS)
    return fields + PRESETS + schedules(n)


# The CPU compiler of jax 0.10 removes the barriers that keep a recomputation apart from the forward
# pass. Inside a loop none is needed; a single layer, an unrolled loop and a BlockSeq are warned of.
KEEPS_BARRIERS = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)


@contextlib.contextmanager
def platform_warnings_ignored():
    """Silences what stackax says of a CPU: that offloading saves nothing, or remat is undone."""
    with warnings.catch_warnings():
        for about in ("host memory", "optimization barriers"):
            warnings.filterwarnings("ignore", message=f"(?s).*{about}", category=UserWarning)
        yield


# What a law differentiates


def weigh(tree) -> jax.Array:
    """A scalar that depends on every float of a tree, each with its own weight."""
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            weights = jnp.linspace(0.5, 1.5, leaf.size).reshape(leaf.shape)
            total = total + jnp.sum(weights * leaf.astype(jnp.float32))
    return total


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that a loop's gradient can be taken for, beside the blocks themselves.

    Attributes:
        carry: the first carry.
        scale: per-layer argument: named over the layers, or plain of shape (layers,).
        shift: shared argument, a scalar array.
        closed: a value that the step closes over.
    """

    carry: Any
    scale: Any
    shift: jax.Array
    closed: jax.Array


jax.tree_util.register_dataclass(Inputs, ["carry", "scale", "shift", "closed"], [])


def inputs(block: Block, n: int, seed: int = 1) -> Inputs:
    """Inputs for a stack of n blocks; `scale` is named, so that it is per layer without a mark."""
    k_carry, k_scale = jr.split(jr.key(seed))
    scale = hax.named(draw(k_scale, (n,))[0], layers(n))
    return Inputs(block.carry(k_carry), scale, jnp.asarray(0.1), jnp.asarray(0.7))


def step(block, carry, scale, shift, *, closed):
    """One layer: `closed` bends the carry, then the block runs.

    A block of plain arrays can't take a NamedArray of no axes; it gets the scalar inside.
    """
    scale = scale if isinstance(carry, hax.NamedArray) else scale.array
    return block(carry * closed, scale, shift)


def via(stack, x: Inputs, *, scans: bool, **options):
    """Runs a container over `step`; returns `(carry, outputs)`, outputs `None` for a fold."""
    fn = ft.partial(step, closed=x.closed)
    if scans:
        return stack.scan_via(fn, **options)(x.carry, x.scale, x.shift)
    return stack.fold_via(fn, **options)(x.carry, x.scale, x.shift), None
