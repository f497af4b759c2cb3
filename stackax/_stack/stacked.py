"""Stacked: equal blocks whose arrays share one axis of layers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray
from haliax.state_dict import StateDict

from .._loop.loop import PerBlock, run
from .._loop.marks import Block as BlockMark
from .._loop.slicing import Slicer, is_array, is_named
from .._loop.vectorised import check_alike, run_vectorised, stack_trees
from .._policy.per_call import policy_of_call
from .._policy.policy import RematSpec, as_policy
from ..stream._stream import Stream
from . import base, state_dicts
from .base import Container

M = TypeVar("M")


class Stacked(Container[M], hax.nn.Stacked, Generic[M]):  # pyright: ignore
    """N equal blocks as one block whose arrays have a layer axis, run by one loop.

    The loop is compiled once whatever N is. What its backward pass keeps is decided by
    `gradient_checkpointing`, or call by call by `remat=`. A stack is also a sequence of its blocks:
    `len(layers)`, `layers[0]`, `layers[-2:]` (a stack of two) and `for layer in layers`.

    Attributes:
        stacked: The block; every array of it has the axis `Block`: NamedArrays by name, plain
            arrays as their first.
        Block: The axis of the layers.
        gradient_checkpointing: The policy.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> from haliax import Axis
        >>> from stackax import Stacked
        >>> Layers = Axis("layers", 3)
        >>> layers = Stacked.init(Layers, eqx.nn.Linear)(4, 4, key=jax.random.key(0))
        >>> layers.stacked.weight.shape, layers.fold(jnp.ones(4)).shape, len(layers)
        ((3, 4, 4), (4,), 3)
        >>> layers.fold(jnp.ones(4), remat="full").shape
        (4,)

    References:
        Mirrors `haliax.nn.Stacked`, and is one (`isinstance`).
    """

    def __init__(self, stacked: M, Block: Axis, gradient_checkpointing: RematSpec = False):
        self.stacked = stacked
        self.Block = Block
        self.gradient_checkpointing = as_policy(gradient_checkpointing, "gradient_checkpointing")

    @classmethod
    def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        Block: Axis,
        module: Callable[..., M],
        *,
        gradient_checkpointing: RematSpec = False,
        prevent_cse: bool | None = None,
    ) -> Callable[..., "Stacked[M]"]:
        """Makes the blocks, all at once.

        Args:
            Block: The axis of the layers.
            module: A class with an `init`, any Equinox class, or a function that makes a block.
            gradient_checkpointing: The policy, or an alias of one.
            prevent_cse: Deprecated, as in Haliax.

        Returns:
            A function of the block's own arguments. Each layer gets its own slice of NamedArrays
            with the axis `Block`, of plain arrays and of what is marked `per_layer`; one typed
            PRNG key is split.

        Raises:
            ValueError: An argument to be sliced has another size; there is no such policy.
            TypeError: `Block` is not an axis, or `module` neither a class nor a function.

        Example:
            >>> import equinox as eqx, jax
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> Layers = Axis("layers", 3)
            >>> make = Stacked.init(Layers, eqx.nn.Linear, gradient_checkpointing="nested")
            >>> make(4, 4, key=jax.random.key(0)).stacked.weight.shape
            (3, 4, 4)
        """
        base.check_axis(Block)
        policy = base.initial_policy(gradient_checkpointing, prevent_cse)
        build = base.builder(module)

        def make(*args: Any, **kwargs: Any) -> "Stacked[M]":
            slicer = Slicer(Block, base.names_of_arguments(None, build, skip=0), "warn")
            arguments = slicer.take_apart(args, kwargs)
            return cls(hax.auto_sharded(run_vectorised(build, arguments, Block)), Block, policy)

        return make

    @classmethod
    def from_layers(
        cls,
        blocks: Sequence[M],
        Layers: Axis | str | None = None,
        *,
        gradient_checkpointing: RematSpec = False,
    ) -> "Stacked[M]":
        """Stacks blocks that exist already.

        Args:
            blocks: At least one; all of the same structure, axes, shapes and dtypes.
            Layers: The axis, or its name; `"layers"` if not given.
            gradient_checkpointing: The policy, or an alias of one.

        Raises:
            ValueError: There are no blocks, or they differ: the place is named.

        Example:
            >>> import equinox as eqx, jax
            >>> from stackax import Stacked
            >>> blocks = [eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(3)]
            >>> Stacked.from_layers(blocks).stacked.weight.shape
            (3, 4, 4)
        """
        blocks = list(blocks)
        if not blocks:
            raise ValueError("Stacked.from_layers needs at least one block to know what it stacks.")
        axis = base.axis_for(Layers, len(blocks))
        cure = "Only equal blocks can be stacked; BlockSeq takes any."
        check_alike(blocks, [f"block {i}" for i in range(len(blocks))], cure)
        return cls(stack_trees(blocks, axis), axis, gradient_checkpointing)

    def unstacked(self) -> Sequence[M]:
        """The blocks, each without the layers' axis."""
        return tuple(self)

    def get_layer(self, index: int) -> M:
        """The block of that index, without the layers' axis.

        Args:
            index: From `-len(self)` to `len(self) - 1`.

        Raises:
            IndexError: There is no such block.
        """
        number = base.layer_number(index, self.Block)

        def take(leaf: Any) -> Any:
            if not self._has_layers(leaf):
                return leaf
            return leaf[self.Block.name, number] if is_named(leaf) else leaf[number]

        return jax.tree.map(take, self.stacked, is_leaf=is_named)

    def set_layer(self, index: int, block: M) -> "Stacked[M]":
        """The same stack with another block in the place of one.

        Args:
            index: From `-len(self)` to `len(self) - 1`.
            block: Of the same structure, axes, shapes and dtypes as the blocks of the stack.

        Raises:
            IndexError: There is no such block.
            ValueError: The block differs from the others: the place is named.

        Example:
            >>> import equinox as eqx, jax
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> layers = layers.set_layer(0, layers[2])
            >>> bool((layers[0].weight == layers[2].weight).all())
            True
        """
        number = base.layer_number(index, self.Block)
        cure = "All layers of a stack have one type; BlockSeq takes any."
        check_alike([self.get_layer(number), block], [f"layer {number}", "the new block"], cure)

        def put(leaf: Any, new: Any) -> Any:
            if not self._has_layers(leaf):
                return leaf
            if not is_named(leaf):
                return leaf.at[number].set(new)
            first = leaf.rearrange((self.Block.name, ...))
            return NamedArray(first.array.at[number].set(new.array), first.axes).rearrange(
                leaf.axes
            )

        stacked = jax.tree.map(put, self.stacked, block, is_leaf=is_named)
        return dataclasses.replace(self, stacked=stacked)

    def to_state_dict(self, prefix: str | None = None) -> StateDict:
        """The blocks' arrays under `prefix.0`, `prefix.1`, ..., as torch's `Sequential` has them.

        Args:
            prefix: What the keys begin with.

        Example:
            >>> import equinox as eqx, jax
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> sorted(layers.to_state_dict("mlp"))[:2]
            ['mlp.0.bias', 'mlp.0.weight']
        """
        return state_dicts.of_layers(self, prefix)

    def from_state_dict(self, state_dict: StateDict, prefix: str | None = None) -> "Stacked[M]":
        """The same stack with arrays from a state dict.

        Args:
            state_dict: Arrays under `prefix.0`, `prefix.1`, ...
            prefix: What the keys begin with.

        Raises:
            ValueError: The state dict has more or fewer layers than the stack.
            KeyError: A layer lacks an array.

        Example:
            >>> import equinox as eqx, jax
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> layers = layers.from_state_dict(layers.to_state_dict("mlp"), "mlp")
            >>> layers[0].weight.shape
            (4, 4)
        """
        blocks = state_dicts.into_layers(state_dict, prefix, [self._template()] * len(self))
        stacked = stack_trees(blocks, self.Block)
        return dataclasses.replace(self, stacked=hax.auto_sharded(stacked))

    def _state_dict_key_map(self) -> dict[str, str | None]:
        return {"stacked": None}

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
        policy = policy_of_call(self.gradient_checkpointing, remat)
        arguments = self._slicer(call.call, skip=2).take_apart(
            (BlockMark(self.stacked), *args), kwargs
        )
        options = {"policy": policy, "reverse": reverse, "unroll": unroll, "stream": stream}
        return run(call, init, arguments, self.Block, **options)

    def _vmap(self, call: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        arguments = self._slicer(call, skip=1).take_apart((BlockMark(self.stacked), *args), kwargs)
        return run_vectorised(call, arguments, self.Block)

    def _slicer(self, call: Callable, skip: int) -> Slicer:
        names = base.names_of_arguments(self.stacked, call, skip)
        return Slicer(self.Block, lambda i: names(i - 1) if i else "the stack", "warn")

    def _sliced(self, indices: slice) -> "Stacked[M]":
        count = len(range(len(self))[indices])
        axis = self.Block.resize(count)

        def cut(leaf: Any) -> Any:
            if not self._has_layers(leaf):
                return leaf
            if not is_named(leaf):
                return leaf[indices]
            first = leaf.rearrange((self.Block.name, ...))
            cut = NamedArray(first.array[indices], (axis, *first.axes[1:]))
            return cut.rearrange(tuple(a.name for a in leaf.axes))

        stacked = jax.tree.map(cut, self.stacked, is_leaf=is_named)
        return type(self)(stacked, axis, self.gradient_checkpointing)

    def _has_layers(self, leaf: Any) -> bool:
        """Whether a leaf of `stacked` holds something for each layer; others are shared."""
        if not is_array(leaf):
            return False
        if is_named(leaf):
            size = {axis.name: axis.size for axis in leaf.axes}.get(self.Block.name)
        else:
            size = leaf.shape[0] if leaf.ndim else None
        if size not in (None, self.Block.size):
            raise ValueError(
                f"the stack has {self.Block.size} layers, but an array of it has {size} along "
                f"{self.Block.name!r}: {leaf.dtype}{leaf.shape}."
            )
        return size is not None

    def _template(self) -> Any:
        """The type of a layer, without arrays; the stack itself may have none either."""
        return eqx.filter_eval_shape(lambda stack: stack.get_layer(0), self)
