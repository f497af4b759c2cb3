"""What containers of blocks have in common: the interface, and the calls that reduce to one loop.

A container holds one block for each entry of its axis. All that can be run over the blocks is one
loop (`_loop`) and one map (`_vmap`); `fold`, `scan`, `vmap` and their `_via` forms are spellings of
these. So the containers can only differ in where their blocks live.
"""

import abc
import dataclasses
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import equinox as eqx
from haliax import Axis

from .._loop.loop import PerBlock
from .._loop.slicing import argument_names, show_axes
from .._policy.policy import RematSpec, ScanCheckpointPolicy, as_policy
from ..stream._stream import Stream

M = TypeVar("M")
M_co = TypeVar("M_co", covariant=True)


@runtime_checkable
class BlockFoldable(Protocol[M_co]):
    """What `Stacked` and `BlockSeq` have in common, as a type for annotations.

    Example:
        >>> import equinox as eqx, jax
        >>> from haliax import Axis
        >>> from stackax import BlockFoldable, Stacked
        >>> layers = Stacked.init(Axis("layers", 2), eqx.nn.Linear)(4, 4, key=jax.random.key(0))
        >>> isinstance(layers, BlockFoldable)
        True
    """

    Block: Axis
    gradient_checkpointing: ScanCheckpointPolicy

    def fold(self, init: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the blocks one after the other, each on what the one before returned."""
        ...

    def scan(self, init: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The same with blocks that return a pair of carry and output."""
        ...

    def fold_via(self, fn: Callable) -> Callable:
        """`fold` with `fn(block, carry, ...)` in the place of the block's own call."""
        ...

    def scan_via(self, fn: Callable) -> Callable:
        """`scan` with `fn(block, carry, ...)` in the place of the block's own call."""
        ...

    def vmap(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all blocks on the same arguments."""
        ...

    def vmap_via(self, fn: Callable) -> Callable:
        """`vmap` with `fn(block, ...)` in the place of the block's own call."""
        ...

    def unstacked(self) -> Sequence[M_co]:
        """The blocks."""
        ...

    def get_layer(self, index: int) -> M_co:
        """The block of that index."""
        ...


class Container(Generic[M]):
    """The methods that `Stacked` and `BlockSeq` share."""

    Block: Axis
    gradient_checkpointing: ScanCheckpointPolicy

    @abc.abstractmethod
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
        """Runs `call` on the blocks one after the other."""

    @abc.abstractmethod
    def _vmap(self, call: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs `call(block, *args, **kwargs)` on all blocks, and stacks what it returns."""

    @abc.abstractmethod
    def get_layer(self, index: int) -> M:
        """The block of that index.

        Args:
            index: From `-len(self)` to `len(self) - 1`.

        Raises:
            IndexError: There is no such block.
        """

    @abc.abstractmethod
    def _sliced(self, indices: slice) -> Any:
        """A container of some of the blocks."""

    @property
    def Layers(self) -> Axis:
        """The axis of the blocks: another name for `Block`."""
        return self.Block

    def fold(
        self,
        init: Any,
        *args: Any,
        unroll: int | bool | None = None,
        remat: RematSpec | None = None,
        reverse: bool = False,
        stream: Stream | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the blocks one after the other, each on what the one before returned.

        `for block in stack: carry = block(carry, ...)`, and nothing else. Called eagerly, the loop
        of a `Stacked` is compiled once, as by `jax.jit`: changes of global variables that a block
        reads are not seen afterwards.

        Args:
            init: The first carry: any pytree. A block must return one of the same type.
            *args: Further arguments of the blocks. Each layer gets its own slice of NamedArrays
                with the layers' axis and of what is marked `per_layer`, and the whole of
                NamedArrays without that axis, of scalars, and of what is marked `shared`. A typed
                PRNG key is split. An unmarked plain array is sliced along its first axis, with a
                warning.
            unroll: How many layers one trip of the loop runs; `True` for all.
            remat: What the backward pass keeps, in the place of the stack's own policy.
            reverse: Whether to run from the last block to the first.
            stream: Where the weights come from, one layer ahead of their use: a value of
                `stackax.stream.from_shards` or `from_host`. A streamed stack always recomputes
                its layers in the backward pass, so to be differentiated it needs a policy of
                carries: `remat=True`, nested, slots, offloaded carries.
            **kwargs: Further arguments of the blocks, likewise.

        Returns:
            The last carry.

        Raises:
            ValueError: An argument to be sliced has another size than the layers' axis; the policy
                names nothing.
            TypeError: A block returns a carry of another type.

        Example:
            >>> import equinox as eqx, jax, jax.numpy as jnp
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> layers.fold(jnp.ones(4), remat="full", reverse=True).shape
            (4,)
        """
        call = PerBlock(call_block, has_outputs=False)
        options = {"unroll": unroll, "remat": remat, "reverse": reverse, "stream": stream}
        return self._loop(call, init, args, kwargs, **options)[0]

    def scan(
        self,
        init: Any,
        *args: Any,
        unroll: int | bool | None = None,
        remat: RematSpec | None = None,
        reverse: bool = False,
        stream: Stream | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Runs the blocks one after the other, and stacks what each returns beside the carry.

        Args:
            init: As in `fold`.
            *args: As in `fold`.
            unroll: As in `fold`.
            remat: As in `fold`.
            reverse: As in `fold`. Outputs keep the order of the layers.
            stream: As in `fold`.
            **kwargs: As in `fold`.

        Returns:
            The last carry, and the blocks' outputs with the layers' axis first.

        Raises:
            ValueError: As in `fold`; or a block returns no pair.
            TypeError: As in `fold`.

        Example:
            >>> import equinox as eqx, jax, jax.numpy as jnp
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> class Halve(eqx.Module):
            ...     rate: jax.Array
            ...     def __call__(self, x):
            ...         return self.rate * x, x
            >>> layers = Stacked(Halve(jnp.full(3, 0.5)), Axis("layers", 3))
            >>> last, seen = layers.scan(8.0)
            >>> float(last), seen.tolist()
            (1.0, [8.0, 4.0, 2.0])
        """
        call = PerBlock(call_block, has_outputs=True)
        options = {"unroll": unroll, "remat": remat, "reverse": reverse, "stream": stream}
        return self._loop(call, init, args, kwargs, **options)

    def fold_via(
        self,
        fn: Callable,
        *,
        unroll: int | bool | None = None,
        remat: RematSpec | None = None,
        reverse: bool = False,
        stream: Stream | None = None,
    ) -> Callable:
        """`fold` with `fn(block, carry, ...)` in the place of the block's own call.

        Args:
            fn: Returns the carry.
            unroll: As in `fold`.
            remat: As in `fold`.
            reverse: As in `fold`.
            stream: As in `fold`.

        Returns:
            A function of `(init, *args, **kwargs)`, which raises what `fold` raises.

        Example:
            >>> import equinox as eqx, jax, jax.numpy as jnp
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> residual = layers.fold_via(lambda layer, x: x + layer(x))
            >>> residual(jnp.ones(4)).shape
            (4,)
        """
        call = PerBlock(fn, has_outputs=False)

        def folded(init: Any, *args: Any, **kwargs: Any) -> Any:
            options = {"unroll": unroll, "remat": remat, "reverse": reverse, "stream": stream}
            return self._loop(call, init, args, kwargs, **options)[0]

        return folded

    def scan_via(
        self,
        fn: Callable,
        *,
        unroll: int | bool | None = None,
        remat: RematSpec | None = None,
        reverse: bool = False,
        stream: Stream | None = None,
    ) -> Callable:
        """`scan` with `fn(block, carry, ...)` in the place of the block's own call.

        Args:
            fn: Returns a pair of carry and output.
            unroll: As in `fold`.
            remat: As in `fold`.
            reverse: As in `fold`.
            stream: As in `fold`.

        Returns:
            A function of `(init, *args, **kwargs)`, which raises what `scan` raises.

        Example:
            >>> import equinox as eqx, jax, jax.numpy as jnp
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> norms = layers.scan_via(lambda layer, x: (layer(x), jnp.linalg.norm(x)))
            >>> norms(jnp.ones(4))[1].shape
            (3,)
        """
        call = PerBlock(fn, has_outputs=True)

        def scanned(init: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            options = {"unroll": unroll, "remat": remat, "reverse": reverse, "stream": stream}
            return self._loop(call, init, args, kwargs, **options)

        return scanned

    def vmap(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all blocks, each on its own arguments, as if side by side.

        Args:
            *args: Arguments of the blocks, sliced or shared as in `fold`.
            **kwargs: Likewise.

        Returns:
            What the blocks return, with the layers' axis first.

        Raises:
            ValueError: As in `fold`.

        Example:
            >>> import equinox as eqx, jax, jax.numpy as jnp
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> from stackax import shared
            >>> layers.vmap(shared(jnp.ones(4))).shape
            (3, 4)
        """
        return self._vmap(call_block, args, kwargs)

    def vmap_via(self, fn: Callable) -> Callable:
        """`vmap` with `fn(block, ...)` in the place of the block's own call.

        Args:
            fn: Takes a block and its arguments.

        Returns:
            A function of `(*args, **kwargs)`, which raises what `vmap` raises.

        Example:
            >>> import equinox as eqx, jax, jax.numpy as jnp
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> layers.vmap_via(lambda layer: jnp.linalg.norm(layer.weight))().shape
            (3,)
        """

        def mapped(*args: Any, **kwargs: Any) -> Any:
            return self._vmap(fn, args, kwargs)

        return mapped

    def with_policy(self, policy: RematSpec) -> Any:
        """The same blocks under another policy.

        Args:
            policy: A policy or an alias of one.

        Raises:
            ValueError: There is no policy of that name.

        Example:
            >>> import equinox as eqx, jax, jax.numpy as jnp
            >>> from haliax import Axis
            >>> from stackax import Stacked
            >>> make = Stacked.init(Axis("layers", 3), eqx.nn.Linear)
            >>> layers = make(4, 4, key=jax.random.key(0))
            >>> layers.with_policy("nested").gradient_checkpointing
            ScanCheckpointPolicy(nested=True)
        """
        # A container is a dataclass, which its mixin cannot say.
        return dataclasses.replace(self, gradient_checkpointing=as_policy(policy, "policy"))  # pyright: ignore

    def __len__(self) -> int:
        return self.Block.size

    def __iter__(self) -> Iterator[M]:
        return (self.get_layer(i) for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._sliced(index)
        return self.get_layer(index)


def call_block(block: Callable, *args: Any, **kwargs: Any) -> Any:
    """The block's own call."""
    return block(*args, **kwargs)


def layer_number(index: Any, layers: Axis) -> int:
    """`index` counted from the first layer.

    Raises:
        TypeError: It is no whole number.
        IndexError: There is no such layer.
    """
    try:
        number = operator.index(index)
    except TypeError:
        raise TypeError(
            f"a layer's index must be a whole number, not {index!r}; stacks are sliced with "
            "whole numbers too."
        ) from None
    if not -layers.size <= number < layers.size:
        raise IndexError(
            f"there is no layer {number} of {layers.name!r}, which has {layers.size}: the last "
            f"is {layers.size - 1}."
        )
    return number % layers.size


def names_of_arguments(blocks: Any, call: Callable, skip: int) -> Callable[[int], str]:
    """What messages call the arguments of `call`, of which the first `skip` are the loop's own."""
    if call is call_block:
        call = type(blocks).__call__ if callable(blocks) else call
    return argument_names(call, skip)


def check_axis(Block: Any) -> None:
    """Refuses what is not an axis.

    Raises:
        TypeError: `Block` is not a haliax.Axis.
    """
    if not isinstance(Block, Axis):
        raise TypeError(f"Block must be an axis, such as haliax.Axis('layers', 12), not {Block!r}.")


def builder(module: Any) -> Callable:
    """What makes a block: `module.init` if there is one, else the class or factory itself."""
    if isinstance(module, eqx.Module):
        raise TypeError(
            f"a block is made by a class or a function, but this {type(module).__name__} is a "
            "block already: give its class, or stack blocks with from_layers."
        )
    init = getattr(module, "init", module)
    if not callable(init):
        raise TypeError(f"a block is made by a class or a function, which {module!r} is not.")
    return init


def initial_policy(
    gradient_checkpointing: RematSpec, prevent_cse: bool | None
) -> ScanCheckpointPolicy:
    """The policy that an `init` is given, with Haliax's deprecated argument beside it."""
    policy = as_policy(gradient_checkpointing, "gradient_checkpointing")
    if prevent_cse is None:
        return policy
    warnings.warn(
        "prevent_cse= is deprecated, as in Haliax: give gradient_checkpointing="
        "ScanCheckpointPolicy(prevent_cse=...).",
        DeprecationWarning,
        stacklevel=3,
    )
    if not policy.recomputes:  # Haliax takes it here too, where there is nothing to prevent
        return policy
    return dataclasses.replace(policy, prevent_cse=prevent_cse)


def axis_for(Layers: Axis | str | None, count: int) -> Axis:
    """The axis of `count` blocks, from what the caller says of it.

    Raises:
        ValueError: The caller's axis has another size.
    """
    if isinstance(Layers, Axis):
        if Layers.size != count:
            raise ValueError(f"Layers is {show_axes((Layers,))}, but there are {count} blocks.")
        return Layers
    return Axis("layers" if Layers is None else Layers, count)
