"""One table of keys per family of checkpoints, read both ways."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from .._axes import LAYERS
from ..lm import Decoder
from ._safetensors import Tensors

LAYER = "{layer}"


def unchanged(tensor: np.ndarray) -> np.ndarray:
    """The tensor, whose layout is the same here and there."""
    return tensor


@dataclasses.dataclass(frozen=True)
class Row:
    """A tensor of a checkpoint, and the array that it is here.

    Attributes:
        key: Its name there; with `{layer}` in it, one for each layer.
        where: The array in a decoder, or None where this decoder has none.
        theirs: From the array (of one layer) to the tensor.
        ours: From the tensor to the array, but for its shape.
    """

    key: str
    where: Callable[[Decoder], NamedArray | None]
    theirs: Callable[[np.ndarray], np.ndarray] = unchanged
    ours: Callable[[np.ndarray], np.ndarray] = unchanged


def read_rows(rows: Sequence[Row], like: Decoder, tensors: Tensors) -> Decoder:
    """A decoder with the arrays of a checkpoint, cast to the dtypes of `like`.

    Args:
        rows: The table.
        like: A decoder, whose arrays may be `jax.ShapeDtypeStruct`s.
        tensors: The checkpoint.

    Returns:
        The decoder.

    Raises:
        ValueError: if a tensor is missing or of another shape, or the table leaves out an array.
    """
    places = _places(rows, like)
    arrays = [_read_row(row, place, tensors) for row, place in places]
    return eqx.tree_at(
        lambda decoder: [row.where(decoder) for row, _ in places],
        like,
        arrays,
        is_leaf=lambda x: isinstance(x, NamedArray),
    )


def write_rows(rows: Sequence[Row], decoder: Decoder) -> dict[str, np.ndarray]:
    """The tensors that a checkpoint holds of a decoder, by name.

    Args:
        rows: The table.
        decoder: The decoder.

    Returns:
        The tensors.

    Raises:
        ValueError: if the table leaves out an array.
    """
    tensors = {}
    for row, array in _places(rows, decoder):
        if LAYER in row.key:
            stacked = np.asarray(array.rearrange((LAYERS, ...)).array)
            for layer, part in enumerate(stacked):
                tensors[row.key.format(layer=layer)] = row.theirs(part)
        else:
            tensors[row.key] = row.theirs(np.asarray(array.array))
    return tensors


def _read_row(row: Row, place: NamedArray, tensors: Tensors) -> NamedArray:
    if LAYER not in row.key:
        return hax.named(jnp.asarray(_read(row, row.key, place.array, tensors)), place.axes)
    first = jax.eval_shape(lambda x: x.rearrange((LAYERS, ...)), place)
    one = jax.ShapeDtypeStruct(first.array.shape[1:], first.array.dtype)
    layers = range(first.axes[0].size)
    parts = [_read(row, row.key.format(layer=layer), one, tensors) for layer in layers]
    stacked = hax.named(jnp.asarray(np.stack(parts)), first.axes)
    return stacked.rearrange(place.axes)


def _read(row: Row, name: str, wanted: Any, tensors: Tensors) -> np.ndarray:
    expected = row.theirs(np.broadcast_to(np.zeros((), np.int8), wanted.shape)).shape
    if tensors.shape(name) != expected:
        raise ValueError(
            f"the checkpoint's {name} has shape {tensors.shape(name)}, but the config makes it "
            f"{expected}"
        )
    return row.ours(tensors.read(name)).reshape(wanted.shape).astype(wanted.dtype)


def _places(rows: Sequence[Row], decoder: Decoder) -> list[tuple[Row, NamedArray]]:
    """The rows that a decoder has arrays for, and these.

    Raises:
        ValueError: if it has an array that the table forgets, which would keep its value unseen.
    """
    found = [(row, row.where(decoder)) for row in rows]
    places = [(row, place) for row, place in found if place is not None]
    covered = {id(place.array) for _, place in places}
    leaves = jax.tree_util.tree_flatten_with_path(decoder)[0]
    forgotten = [jax.tree_util.keystr(path) for path, leaf in leaves if id(leaf) not in covered]
    if forgotten:
        raise ValueError(f"the table of keys has no row for the model's {forgotten[0]}")
    return places
