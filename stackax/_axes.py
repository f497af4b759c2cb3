"""The axis vocabulary, and the one helper that checks axes at the door.

Every array of the models in stackax is a `haliax.NamedArray`. These are the names that its axes
may have, in all model families; a family's own axes are listed in its module docstring.

| axis | name | meaning |
|---|---|---|
| `Layers` | `"layers"` | one entry per layer of a stack; blocks never see it |
| `Batch` | `"batch"` | independent sequences; any other name, and several, serve as well |
| `Pos` | `"position"` | positions of a sequence |
| `Embed` | `"embed"` | the residual stream, which is also a layer's carry |
| `Vocab` | `"vocab"` | token values |
"""

from haliax import Axis, NamedArray

LAYERS = "layers"
BATCH = "batch"
POSITION = "position"
EMBED = "embed"
VOCAB = "vocab"


def require_axes(name: str, array: NamedArray, *axes: Axis | str) -> None:
    """Checks that `array` has each of `axes`, by name and, where an `Axis` is given, by size.

    Args:
        name: What the caller calls the array; the message starts with it.
        array: The array to check, with any axes.
        *axes: The axes that it needs. A string asks for an axis of that name and of any size.

    Raises:
        TypeError: if `array` is not a NamedArray.
        ValueError: if an axis is missing or has another size.

    Example:
        >>> import haliax as hax
        >>> from stackax._axes import require_axes
        >>> x = hax.zeros({"position": 3, "embed": 8})
        >>> require_axes("x", x, "position", hax.Axis("embed", 8))
        >>> require_axes("x", x, hax.Axis("embed", 16))
        Traceback (most recent call last):
            ...
        ValueError: x has the axes {position: 3, embed: 8}, but axis 'embed' must have size 16
    """
    if not isinstance(array, NamedArray):
        raise TypeError(
            f"{name} must be a haliax.NamedArray with {_spell(axes)}, but it is of type "
            f"{type(array).__name__}: wrap it with haliax.named(array, axes)"
        )
    for axis in axes:
        _require_axis(name, array, axis)


def forbid_axes(name: str, array: NamedArray, *axes: Axis | str) -> None:
    """Checks that `array` has none of `axes`, which the computation is about to create.

    A contraction of named arrays treats a name that both sides have as a batch axis, so a stray
    axis would silently give the diagonal of the intended result.

    Args:
        name: What the caller calls the array; the message starts with it.
        array: The array to check, with any axes.
        *axes: The axes that it must not have, by name.

    Raises:
        ValueError: if `array` has one of them.

    Example:
        >>> import haliax as hax
        >>> from stackax._axes import forbid_axes
        >>> forbid_axes("x", hax.zeros({"position": 3}), "vocab")
        >>> forbid_axes("x", hax.zeros({"vocab": 3}), "vocab")
        Traceback (most recent call last):
            ...
        ValueError: x has the axes {vocab: 3}, but axis 'vocab' is made here: rename it
    """
    for axis in axes:
        if array.has_axis(axis_name(axis)):
            raise ValueError(
                f"{name} has the axes {_sizes(array)}, but axis {axis_name(axis)!r} is made here: "
                f"rename it"
            )


def axis_name(axis: Axis | str) -> str:
    """The name of an axis given as an `Axis` or as the name itself.

    Example:
        >>> import haliax as hax
        >>> from stackax._axes import axis_name
        >>> axis_name(hax.Axis("embed", 8)), axis_name("embed")
        ('embed', 'embed')
    """
    return axis.name if isinstance(axis, Axis) else axis


def _require_axis(name: str, array: NamedArray, axis: Axis | str) -> None:
    given = f"{name} has the axes {_sizes(array)}"
    if not array.has_axis(axis_name(axis)):
        raise ValueError(f"{given}, but needs {_spell([axis])}")
    if isinstance(axis, Axis) and array.axis_size(axis.name) != axis.size:
        raise ValueError(f"{given}, but axis {axis.name!r} must have size {axis.size}")


def _sizes(array: NamedArray) -> str:
    return "{" + ", ".join(f"{axis.name}: {axis.size}" for axis in array.axes) + "}"


def _spell(axes) -> str:
    spelled = [repr(a) if isinstance(a, str) else f"'{a.name}' of size {a.size}" for a in axes]
    return ("axis " if len(spelled) == 1 else "axes ") + ", ".join(spelled)
