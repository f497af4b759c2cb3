"""What is live, and what is fetched, where a stack's weights are gathered a layer ahead?

Eight CPU devices, weights sharded over all of them. An MLP of two equal matrices, in layers of
weights; temporary bytes are the compiler's. In training, a layer's gradients are whole before they
are reduced to shards, which is one layer more.

all_gathers_forward_over_n    gathers of a forward pass of 8 layers, over 8 times a layer's
all_gathers_training_over_n   the same for a training step with simple remat
live_layers                   temp of a forward pass of 32 layers, in layers
live_layers_training          the same for a training step, less the one layer's gradients
peak_n32_over_n4              temp of 32 layers over that of 4: the forward pass
peak_n32_over_n4_training     the same for a training step
copies_of_a_layer             copies of a gathered matrix in the program of a training step
max_error                     results and gradients against the whole stack's, shards and host
"""

import functools as ft
import re
import sys
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from report import run

from stackax import Stacked, stream

sys.path.append(str(Path(__file__).parents[1]))
from tests.reference.hlo import Program  # noqa: E402
from tests.reference.programs import relative_error  # noqa: E402

BATCH, EMBED, HIDDEN = 8, 128, 512
LAYER_BYTES = 2 * EMBED * HIDDEN * 4
SHARDED = PartitionSpec(None, "data")
SHARDS = stream.from_shards("data", SHARDED)


class MLP(eqx.Module):
    """Two matrices, both divisible over eight devices."""

    up: jax.Array
    down: jax.Array

    def __init__(self, embed: int, hidden: int, *, key):
        up, down = jr.split(key)
        self.up = jr.normal(up, (embed, hidden)) / embed**0.5
        self.down = jr.normal(down, (hidden, embed)) / hidden**0.5

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up) @ self.down


def measure() -> dict[str, object]:
    """All figures."""
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        return {**of_programs(mesh), "max_error": max_error(mesh)}


def of_programs(mesh) -> dict[str, object]:
    """What the compiler says."""
    forward, training = (ft.partial(compiled, mesh, step) for step in (fold, gradient))
    text = training(8).as_text()
    matrix = f"(?:{EMBED},{HIDDEN}|{HIDDEN},{EMBED})"
    return {
        "all_gathers_forward_over_n": gathers(forward(8)) / 8,
        "all_gathers_training_over_n": gathers(training(8)) / 8,
        "live_layers": temp(forward(32)) / LAYER_BYTES,
        "live_layers_training": temp(training(32)) / LAYER_BYTES - 1,
        "peak_n32_over_n4": temp(forward(32)) / temp(forward(4)),
        "peak_n32_over_n4_training": temp(training(32)) / temp(training(4)),
        "copies_of_a_layer": len(re.findall(rf"= f32\[{matrix}\]\S* copy\(", text)),
    }


def fold(stack, x, **options):
    """A forward pass."""
    return stack.fold(x, remat=True, **options)


def gradient(stack, x, **options):
    """A training step's gradients, and its result."""

    def loss(stack, x):
        out = fold(stack, x, **options)
        return jnp.sum(jnp.sin(out)), out

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(stack, x)


@ft.cache
def compiled(mesh, step, layers: int):
    """A step of a sharded stack, compiled for its shapes."""

    def shape(a, spec):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    stack = jax.eval_shape(lambda: make(layers, EMBED, HIDDEN))
    stack = jax.tree.map(lambda a: shape(a, SHARDED), stack)
    x = shape(jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32), PartitionSpec("data"))
    return jax.jit(ft.partial(step, stream=SHARDS)).lower(stack, x).compile()


def make(layers: int, embed: int, hidden: int) -> Stacked:
    """The stack."""
    return Stacked.init(hax.Axis("layers", layers), MLP)(embed, hidden, key=jr.key(0))


def gathers(program: jax.stages.Compiled) -> float:
    """How many layers are gathered, of two matrices each."""
    return Program(program.as_text()).runs("all-gather") / 2


def temp(program: jax.stages.Compiled) -> int:
    """Temporary bytes."""
    return program.memory_analysis().temp_size_in_bytes


def max_error(mesh) -> float:
    """The largest relative difference from the whole stack, streamed both ways."""
    stack, x = make(5, 8, 16), jr.normal(jr.key(1), (BATCH, 8))
    expected = jax.device_get(jax.jit(gradient)(stack, x))
    sharded = jax.device_put(stack, NamedSharding(mesh, SHARDED))
    on_host = jax.device_put(stack, jax.memory.Space.Host)
    return max(
        relative_error(
            jax.device_get(jax.jit(ft.partial(gradient, stream=source))(placed, x)), expected
        )
        for placed, source in ((sharded, SHARDS), (on_host, stream.from_host()))
    )


if __name__ == "__main__":
    run(__doc__, measure)
