"""Draws the pictures of the documentation, from the library itself: `python docs/img/draw.py`.

Committed as SVG, whose texts stay texts; a test draws them again and compares. They have a white
ground of their own, so that they read alike on light and dark pages.
"""

import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import matplotlib
from matplotlib.figure import Figure

from stackax import ScanCheckpointPolicy, Stacked, checkpoint_name
from stackax.memory import explain, plan
from stackax.plot import plot_front, plot_schedule, plot_timeline
from stackax.transformer import TransformerBlock, TransformerConfig

FOLDER = Path(__file__).parent
LAYERS = 9
# The schedules share one scale of time, that of the longest, so that lengths can be compared.
SCHEDULES: Mapping[str, tuple[list[Any], dict[str, Any]]] = {
    "schedule_none": (["none"], {}),
    "schedule_full": (["full"], {}),
    "schedule_names": (["save_qkv_proj"], {}),
    "schedule_nested": ([ScanCheckpointPolicy(nested=3)], {}),
    "schedule_slots": (["slots=3"], {}),
    "schedule_offload": (["offload"], {}),
    "schedule_stream": (["full"], {"stream": True}),
}


def main() -> None:
    """Draws them all; with names, those."""
    for name in sys.argv[1:] or PICTURES:
        (FOLDER / f"{name}.svg").write_text(drawn(name), encoding="utf-8")


def drawn(name: str) -> str:
    """A picture as the text of an SVG, the same whenever it is drawn.

    Args:
        name: The name of its file, without `.svg`.

    Returns:
        The text.
    """
    figure, text = PICTURES[name](), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(
            text,
            format="svg",
            facecolor="white",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return text.getvalue().decode()


def schedule(name: str) -> Figure:
    """One policy's schedule."""
    policies, options = SCHEDULES[name]
    figure = plot_schedule(policies, LAYERS, **options)
    longest = plot_schedule("slots=3", LAYERS).axes[0].get_xlim()
    figure.axes[0].set_xlim(longest)
    return figure


def timeline() -> Figure:
    """The live bytes of a step of the stack of docs/choosing_a_policy.md, with simple remat."""
    config = TransformerConfig(layers=48, width=128, heads=4, vocab_size=1, seq_len=128)
    make = Stacked.init(config.Layers, TransformerBlock)
    layers = eqx.filter_eval_shape(lambda: make(config, key=jax.random.key(0)))
    x = eqx.filter_eval_shape(lambda: hax.zeros({"batch": 4, "position": 128, "embed": 128}))
    loss = lambda layers, x: jnp.mean(jnp.square(layers.fold(x).array))  # noqa: E731
    return plot_timeline(explain(loss, layers, x, argnums=0, remat="full"))


class GatedBlock(eqx.Module):
    """The block of docs/fit_a_budget.md."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        gate = checkpoint_name(normed @ self.gate, "gate")
        up = checkpoint_name(normed @ self.up, "up")
        return x + checkpoint_name(jax.nn.silu(gate) * up, "hidden") @ self.down


def front() -> Figure:
    """The plan of docs/fit_a_budget.md."""
    shapes = [(24, 64, 256), (24, 64, 256), (24, 256, 64)]
    blocks = GatedBlock(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    layers = Stacked(blocks, hax.Axis("layers", 24))
    x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    loss = lambda layers, x: jnp.mean(layers.fold(x) ** 2)  # noqa: E731
    return plot_front(plan(loss, layers, x, argnums=0, budget_bytes="48 MiB"))


PICTURES: Mapping[str, Callable[[], Figure]] = {
    **{name: lambda name=name: schedule(name) for name in SCHEDULES},
    "timeline": timeline,
    "front": front,
}


if __name__ == "__main__":
    main()
