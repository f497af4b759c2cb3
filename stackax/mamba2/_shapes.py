"""The shapes of plain arrays, checked at the door by letters that several arrays share."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp


def bind_shapes(arrays: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """Checks that arrays agree in every size that they share, and gives the sizes by letter.

    Args:
        arrays: By the caller's name for it, an array and its shape in letters, as
            `"*batch T H P"`. A letter stands for one size, `*batch` for any number of leading
            sizes; the first array that has a letter says its size. None is skipped.

    Returns:
        The size of each letter, and under `"*batch"` a tuple of sizes.

    Raises:
        TypeError: if one is not an array.
        ValueError: if a shape has another number of axes, or a size that another array has not.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2._shapes import bind_shapes
        >>> sizes = bind_shapes({"x": (jnp.ones((2, 5, 3)), "*batch T C")})
        >>> sizes["*batch"], sizes["T"], sizes["C"]
        ((2,), 5, 3)
    """
    sizes: dict[str, Any] = {}
    givers: dict[str, str] = {}
    for name, (array, letters) in arrays.items():
        if array is None:
            continue
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{name} must be an array of shape {_spell(letters)}, not {array!r}")
        for letter, size in _split(name, array.shape, letters).items():
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{name} has shape {array.shape}, but needs {_spell(letters)} with "
                    f"{letter} = {sizes[letter]} as in {givers[letter]}"
                )
            givers.setdefault(letter, name)
    return sizes


def require_floating(**arrays: Any) -> None:
    """Checks that arrays hold floating-point numbers.

    Args:
        **arrays: The arrays, by the caller's names for them; None is skipped.

    Raises:
        TypeError: if one does not.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2._shapes import require_floating
        >>> require_floating(x=jnp.ones(3), dt=None)
    """
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name} holds {array.dtype}, but must hold floating-point numbers")


def _split(name: str, shape: tuple[int, ...], letters: str) -> dict[str, Any]:
    wanted = letters.split()
    has_batch = wanted[0] == "*batch"
    fixed = wanted[has_batch:]
    if len(shape) < len(fixed) or (len(shape) > len(fixed) and not has_batch):
        raise ValueError(f"{name} has shape {shape}, but needs {_spell(letters)}")
    at = len(shape) - len(fixed)
    split: dict[str, Any] = {"*batch": shape[:at]} if has_batch else {}
    for letter, size in zip(fixed, shape[at:], strict=True):
        if split.setdefault(letter, size) != size:
            raise ValueError(f"{name} has shape {shape}, but needs {_spell(letters)}")
    return split


def _spell(letters: str) -> str:
    parts = letters.split()
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
