"""BlockSeq: any blocks, run by a Python loop."""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis
from haliax.state_dict import StateDict

from .._loop.loop import PerBlock, carry_name, trip_length
from .._loop.schedule import schedule_for
from .._loop.slicing import Arguments, Slicer, is_array
from .._loop.step import Step
from .._loop.unrolled import run_unrolled
from .._loop.vectorised import check_alike, stack_trees
from .._policy.names import check_names, find_names, has_names_to_check
from .._policy.per_call import policy_of_call
from .._policy.policy import RematSpec, ScanCheckpointPolicy, as_policy
from ..stream._stream import Stream
from . import base, state_dicts
from .base import Container

M = TypeVar("M")


class BlockSeq(Container[M], hax.nn.BlockSeq, Generic[M]):  # pyright: ignore
    """Blocks that need not be alike, run one after the other by a Python loop.

    It takes the same arguments as `Stacked`, honours the same policies and gives the same results.
    Every block is compiled on its own, so compilation takes time in proportion to their number. Its
    methods are those of `Stacked`, the ones that are not listed here included.

    Attributes:
        blocks: The blocks.
        Block: The axis that their outputs are stacked along; as many entries as there are blocks.
        gradient_checkpointing: The policy.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> from stackax import BlockSeq
        >>> keys = jax.random.split(jax.random.key(0), 2)
        >>> linear = eqx.nn.Linear(4, 4, key=keys[0])
        >>> mlp = eqx.nn.MLP(4, 4, width_size=8, depth=1, key=keys[1])
        >>> layers = BlockSeq.from_layers([linear, mlp])
        >>> layers.fold(jnp.ones(4)).shape, len(layers)
        ((4,), 2)

    References:
        Mirrors `haliax.nn.BlockSeq`, and is one (`isinstance`).
    """

    def __init__(self, blocks: Sequence[M], Block: Axis, gradient_checkpointing: RematSpec = False):
        self.blocks = blocks
        self.Block = base.axis_for(Block, len(blocks))
        self.gradient_checkpointing = as_policy(gradient_checkpointing, "gradient_checkpointing")

    @classmethod
    def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        Block: Axis,
        module: Callable[..., M],
        *,
        gradient_checkpointing: RematSpec = False,
        prevent_cse: bool | None = None,
    ) -> Callable[..., "BlockSeq[M]"]:
        """Makes equal blocks, one after the other.

        Args:
            Block: The axis of the layers.
            module: A class with an `init`, any Equinox class, or a function that makes a block.
            gradient_checkpointing: The policy, or an alias of one.
            prevent_cse: Deprecated, as in Haliax.

        Returns:
            A function of the block's own arguments, sliced or shared as in `Stacked.init`.

        Raises:
            ValueError: An argument to be sliced has another size; there is no such policy.
            TypeError: `Block` is not an axis, or `module` neither a class nor a function.

        Example:
            >>> import equinox as eqx, jax
            >>> from haliax import Axis
            >>> from stackax import BlockSeq
            >>> make = BlockSeq.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> layers.blocks[0].weight.shape
            (4, 4)
        """
        base.check_axis(Block)
        policy = base.initial_policy(gradient_checkpointing, prevent_cse)
        build = base.builder(module)

        def make(*args: Any, **kwargs: Any) -> "BlockSeq[M]":
            slicer = Slicer(Block, base.names_of_arguments(None, build, skip=0), "warn")
            arguments = slicer.take_apart(args, kwargs)
            blocks = []
            for i in range(Block.size):
                block_args, block_kwargs = arguments.at(i)
                blocks.append(build(*block_args, **block_kwargs))
            return cls(blocks, Block, policy)

        return make

    @classmethod
    def from_layers(
        cls,
        blocks: Sequence[M],
        Layers: Axis | str | None = None,
        *,
        gradient_checkpointing: RematSpec = False,
    ) -> "BlockSeq[M]":
        """A sequence of blocks that exist already.

        Args:
            blocks: Any blocks whose carries fit together.
            Layers: The axis, or its name; `"layers"` if not given.
            gradient_checkpointing: The policy, or an alias of one.

        Raises:
            ValueError: The axis has another size.

        Example:
            >>> import equinox as eqx, jax
            >>> from stackax import BlockSeq
            >>> blocks = [eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(3)]
            >>> BlockSeq.from_layers(blocks, "depth").Layers.name
            'depth'
        """
        blocks = list(blocks)
        return cls(blocks, base.axis_for(Layers, len(blocks)), gradient_checkpointing)

    def unstacked(self) -> Sequence[M]:
        """The blocks."""
        return self.blocks

    def get_layer(self, index: int) -> M:
        """The block of that index.

        Args:
            index: From `-len(self)` to `len(self) - 1`.

        Raises:
            IndexError: There is no such block.
        """
        return self.blocks[base.layer_number(index, self.Block)]

    def set_layer(self, index: int, block: M) -> "BlockSeq[M]":
        """The same sequence with another block in the place of one.

        Args:
            index: From `-len(self)` to `len(self) - 1`.
            block: Any block.

        Raises:
            IndexError: There is no such block.

        Example:
            >>> import equinox as eqx, jax
            >>> from haliax import Axis
            >>> from stackax import BlockSeq
            >>> make = BlockSeq.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> layers = layers.set_layer(0, layers[2])
            >>> bool((layers[0].weight == layers[2].weight).all())
            True
        """
        blocks = list(self.blocks)
        blocks[base.layer_number(index, self.Block)] = block
        return dataclasses.replace(self, blocks=blocks)

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """The blocks' arrays under `prefix.0`, `prefix.1`, ..., as torch's `Sequential` has them.

        Args:
            prefix: What the keys begin with.

        Example:
            >>> import equinox as eqx, jax
            >>> from haliax import Axis
            >>> from stackax import BlockSeq
            >>> make = BlockSeq.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> sorted(layers.to_state_dict("mlp"))[:2]
            ['mlp.0.bias', 'mlp.0.weight']
        """
        return state_dicts.of_layers(self.blocks, prefix)

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> "BlockSeq[M]":
        """The same sequence with arrays from a state dict.

        Args:
            state_dict: Arrays under `prefix.0`, `prefix.1`, ...
            prefix: What the keys begin with.

        Raises:
            ValueError: The state dict has more or fewer layers than the sequence.
            KeyError: A layer lacks an array.

        Example:
            >>> import equinox as eqx, jax
            >>> from haliax import Axis
            >>> from stackax import BlockSeq
            >>> make = BlockSeq.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> layers = layers.from_state_dict(layers.to_state_dict("mlp"), "mlp")
            >>> layers[0].weight.shape
            (4, 4)
        """
        blocks = state_dicts.into_layers(state_dict, prefix, self.blocks)
        return dataclasses.replace(self, blocks=blocks)

    def _state_dict_key_map(self) -> dict[str, str | None]:
        return {"blocks": None}

    def _loop(
        self,
        call: PerBlock,
        init: Any,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        unroll: int | bool | None,
        remat: RematSpec | None,
        reverse: bool,
        stream: Stream | None,
    ) -> tuple[Any, Any]:
        if stream is not None:
            raise ValueError(
                "a BlockSeq can't be streamed: its blocks need not be alike, and no loop fetches "
                "one while another runs. Use Stacked, with Stacked.from_layers(blocks), or drop "
                "stream=."
            )
        policy = policy_of_call(self.gradient_checkpointing, remat)
        trip_length(unroll, len(self))  # a Python loop is unrolled, but a bad value is still bad
        arguments = self._slicer(call.call, skip=2).take_apart(args, kwargs)
        step = Step(call, init, arguments, self.Block)
        if not self.blocks:
            return self._of_nothing(step, call)
        order = range(len(self))[:: -1 if reverse else 1]
        self._check_names(step, call, arguments, policy)
        carry, outputs = run_unrolled(
            [ft.partial(self._run_layer, step, call, arguments, i) for i in order],
            step.init,
            tree=schedule_for(len(self), nested=policy.nested, slots=policy.slots),
            policy=policy,
            carry_name=carry_name(self.Block),
        )
        columns = zip(*(outputs[::-1] if reverse else outputs), strict=True)
        return step.carry(carry), step.outputs([jnp.stack(column) for column in columns])

    def _run_layer(
        self, step: Step, call: PerBlock, arguments: Arguments, index: int, carry: list
    ) -> tuple[list, list]:
        args, kwargs = arguments.at(index)
        return step.apply(call, carry, (self.blocks[index], *args), kwargs)

    def _of_nothing(self, step: Step, call: PerBlock) -> tuple[Any, Any]:
        if call.has_outputs:
            raise ValueError(
                "an empty BlockSeq has no block that could say what the outputs are: use fold, or "
                "give it a block."
            )
        return step.carry(step.init), None

    def _check_names(
        self, step: Step, call: PerBlock, arguments: Arguments, policy: ScanCheckpointPolicy
    ) -> None:
        if not has_names_to_check(policy):
            return
        seen = []
        for i, block in enumerate(self.blocks):
            arrays, rest = eqx.partition((block, arguments.at(i)), is_array)

            def run_layer(carry: list, arrays: Any, rest: Any = rest) -> tuple[list, list]:
                block, (args, kwargs) = eqx.combine(arrays, rest)
                return step.apply(call, carry, (block, *args), kwargs)

            seen.append(find_names(run_layer, (step.init, arrays), policy))
        check_names(policy, seen, self.Block.name)

    def _vmap(self, call: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        arguments = self._slicer(call, skip=1).take_apart(args, kwargs)
        results = []
        for i, block in enumerate(self.blocks):
            block_args, block_kwargs = arguments.at(i)
            results.append(call(block, *block_args, **block_kwargs))
        names = [f"what block {i} returns" for i in range(len(results))]
        check_alike(results, names, "Only equal results can be stacked.")
        return stack_trees(results, self.Block)

    def _slicer(self, call: Callable, skip: int) -> Slicer:
        first = self.blocks[0] if self.blocks else None
        return Slicer(self.Block, base.names_of_arguments(first, call, skip), "warn")

    def _sliced(self, indices: slice) -> "BlockSeq[M]":
        blocks = list(self.blocks)[indices]
        return type(self)(blocks, self.Block.resize(len(blocks)), self.gradient_checkpointing)
