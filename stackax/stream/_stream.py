"""What a stream is to a loop: for each array of the stacked block, a route, or none.

A loop over a streamed stack fetches the slices that have a route one layer ahead of their use, and
sends their gradients back by the same route.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

from haliax import Axis


class StackedArray(NamedTuple):
    """An array of a stacked block, as its loop sees it.

    Attributes:
        array: The array, layers first.
        axes: A NamedArray's axes within the layer; None for a plain array.
        path: Where it is in the block: a key path of `jax.tree_util`.
    """

    array: Any
    axes: tuple[Axis, ...] | None
    path: tuple


class Route(abc.ABC):
    """The way of one array's slices to the layer that uses them, and of their gradients back."""

    @abc.abstractmethod
    def fetch(self, x: Any) -> Any:
        """A layer's slice, whole and on the device. Linear in `x`."""

    @abc.abstractmethod
    def send(self, gradient: Any) -> Any:
        """A layer's gradient, in the place and layout of the slice."""

    @abc.abstractmethod
    def room(self, array: Any) -> Any:
        """An array like `array`, in its place and layout, of which every layer is overwritten."""


class Stream(abc.ABC):
    """Where a stack's weights come from. Frozen and hashable: a static argument of a program."""

    @abc.abstractmethod
    def routes(self, arrays: Sequence[StackedArray]) -> list[Route | None]:
        """A route for each array that is to be fetched, None for one that a layer reads in place.

        Raises:
            ValueError: Nothing can be streamed, or not in this way.
        """
