"""The programs on which the estimated peak is compared with the compiler's."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
from blocks import MLP, Transformer

import stackax
from stackax import ScanCheckpointPolicy
from stackax.transformer import TransformerBlock, TransformerConfig

DEPTHS = (4, 12, 17, 48)
PRESETS = (
    "minimal",
    "minimal_with_context",
    "save_qkv_proj",
    "save_out_proj",
    "save_dot_except_mlp",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: a stack's loss, of which value and gradient are taken."""

    block: str
    dtype: str
    layers: int
    batch: int
    seq: int
    policy: str

    def program(self) -> tuple[Callable, tuple[Any, ...]]:
        """The loss, and its arguments as shapes."""
        return PROGRAMS[self.block](self)


def grid(dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> Iterator[Case]:
    """The cases: every block at every depth under every policy that it knows.

    The sizes take turns, such that each policy meets each of them.
    """
    turns = itertools.cycle([(1, 128), (4, 128), (8, 256)])
    for block, n in itertools.product(("mlp", "transformer", "transformer_block"), DEPTHS):
        presets = PRESETS if block == "transformer_block" else ()
        for policy in ("none", "simple", *presets, *thinned(n)):
            yield Case(block, "float32", n, *next(turns), policy)
    if "bfloat16" in dtypes:
        for n, policy in itertools.product((12, 48), ("none", "simple", *PRESETS, *thinned(12))):
            yield Case("transformer_block", "bfloat16", n, *next(turns), policy)
        for n, policy in itertools.product((4, 17), ("none", "simple", *thinned(4)[:1])):
            yield Case("mlp", "bfloat16", n, *next(turns), policy)
            yield Case("transformer", "bfloat16", n, *next(turns), policy)


def thinned(layers: int) -> tuple[str, ...]:
    """Policies that keep some carries: nested at two and at three levels, and slots."""
    return {
        4: ("nested=2", "nested=2,2", "slots=2"),
        12: ("nested=4", "nested=3,2", "slots=3"),
        17: ("nested=4", "nested=4,2", "slots=3"),
        48: ("nested=8", "nested=6,4", "slots=6"),
    }[layers]


def remat_of(policy: str) -> Any:
    """What `gradient_checkpointing` takes, from its short form."""
    kind, _, value = policy.partition("=")
    if kind == "nested" and value:
        return ScanCheckpointPolicy(nested=tuple(map(int, value.split(","))))
    if kind == "slots":
        return ScanCheckpointPolicy(slots=int(value))
    return {"none": False, "simple": True}.get(policy, policy)


def _plain(block: type, shape: Callable[[Case], tuple[int, ...]]) -> Callable:
    def program(case: Case):
        layers = hax.Axis("layers", case.layers)

        def make():
            init = stackax.Stacked.init(layers, block, gradient_checkpointing=remat_of(case.policy))
            return jax.tree.map(lambda x: x.astype(case.dtype), init(jr.key(0)))

        x = jax.ShapeDtypeStruct(shape(case), case.dtype)
        return lambda stack, x: stack.fold(x).sum().astype(jnp.float32), (jax.eval_shape(make), x)

    return program


def _transformer_block(case: Case):
    config = TransformerConfig(
        layers=case.layers, width=128, heads=4, kv_heads=2, vocab_size=64, seq_len=case.seq
    )

    def make():
        remat = remat_of(case.policy)
        init = stackax.Stacked.init(config.Layers, TransformerBlock, gradient_checkpointing=remat)
        return init(config, key=jr.key(0))

    axes = (hax.Axis("batch", case.batch), config.Pos, config.Embed)
    x = jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), case.dtype)
    return lambda stack, x: stack.fold(hax.named(x, axes)).array.astype(jnp.float32).sum(), (
        jax.eval_shape(make),
        x,
    )


PROGRAMS: dict[str, Callable[[Case], tuple[Callable, tuple[Any, ...]]]] = {
    "mlp": _plain(MLP, lambda case: (case.batch * case.seq, 256)),
    "transformer": _plain(Transformer, lambda case: (case.batch, case.seq, 256)),
    "transformer_block": _transformer_block,
}
