"""The stack that a command speaks of: its sizes as options, and the stack itself as shapes."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
from haliax import Axis, NamedArray
from jaxtyping import Array, Float, PRNGKeyArray

from .._stack.stacked import Stacked
from ..transformer import GatedMlp, TransformerBlock, TransformerConfig
from ..transformer._norm import rms_norm
from .options import whole

DEFAULTS = {
    "block": "transformer",
    "layers": 12,
    "width": 128,
    "heads": 4,
    "kv_heads": None,
    "seq_len": 128,
    "batch": 8,
    "dtype": "float32",
}
OPTIONS = {name: "--" + name.replace("_", "-") for name in DEFAULTS}


class MlpBlock(eqx.Module):
    """A pre-norm residual block with nothing in it but a gated MLP."""

    norm: hax.nn.RmsNorm
    mlp: GatedMlp

    @staticmethod
    def init(config: TransformerConfig, *, key: PRNGKeyArray) -> "MlpBlock":
        """Draws the weights of one layer."""
        return MlpBlock(rms_norm(config), GatedMlp.init(config, key=key))

    def __call__(self, x: NamedArray) -> NamedArray:
        return x + self.mlp(self.norm(x))


BLOCKS: dict[str, type[eqx.Module]] = {"transformer": TransformerBlock, "mlp": MlpBlock}


def add_sizes(parser: Any) -> None:
    """Adds the options to a command.

    Args:
        parser: The command's parser.
    """
    group = parser.add_argument_group("stack")

    def add(name: str, help: str, **how: Any) -> None:
        shown = help if DEFAULTS[name] is None else f"{help} (default: {DEFAULTS[name]})"
        group.add_argument(OPTIONS[name], help=shown, default=DEFAULTS[name], **how)

    number = {"type": whole(1), "metavar": "N"}
    add("block", "what is stacked", choices=tuple(BLOCKS))
    add("layers", "number of blocks", **number)
    add("width", "size of the residual stream", **number)
    add("heads", "query heads; they divide the width", **number)
    add(
        "kv_heads",
        "key and value heads; they divide the heads (default: as many)",
        **number,
    )
    add("seq_len", "positions in a sequence", **number)
    add("batch", "sequences in a step", **number)
    add("dtype", "what the blocks compute in", choices=("float32", "bfloat16"))


def stack_and_input(typed: dict[str, Any]) -> tuple[Stacked, NamedArray]:
    """The stack and its input, as shapes: nothing is allocated.

    Args:
        typed: The options, by the names of `DEFAULTS`.

    Raises:
        ValueError: if the sizes do not go together.
    """
    sizes = {name: typed[name] for name in ("layers", "width", "heads", "kv_heads", "seq_len")}
    config = TransformerConfig(vocab_size=1, **sizes)
    make = Stacked.init(config.Layers, BLOCKS[typed["block"]])
    stack = eqx.filter_eval_shape(lambda key: make(config, key=key), jr.key(0))
    axes = (Axis("batch", typed["batch"]), config.Pos, config.Embed)
    return stack, eqx.filter_eval_shape(lambda: hax.zeros(axes, jnp.dtype(typed["dtype"])))


def loss(stack: Stacked, x: NamedArray) -> Float[Array, ""]:
    """A loss that adds nothing to speak of to the stack's own memory: the mean square."""
    return jnp.mean(jnp.square(stack.fold(x).array.astype(jnp.float32)))


def described(typed: dict[str, Any]) -> str:
    """The sizes in one line, for the head of a table."""
    attention = f", {typed['heads']} heads" if typed["block"] == "transformer" else ""
    return (
        f"{typed['layers']} {typed['block']} layers of width {typed['width']}{attention}, "
        f"{typed['batch']} x {typed['seq_len']} positions, {typed['dtype']}, "
        f"on {jax.default_backend()}"
    )
