"""Sizes in bytes: of values, and as people write them."""

import math
import numbers
import re
from typing import Any

_SIZE = re.compile(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(size: int | float | str) -> int:
    """The bytes that a size stands for.

    Args:
        size: A number of bytes, or a text such as `"64MiB"`, `"1.5 GiB"`, `"80 GB"` or `"4096"`.

    Returns:
        The bytes, rounded down.

    Raises:
        TypeError: It is neither a number nor a string.
        ValueError: It is not positive, or its unit is unknown.

    Example:
        >>> from stackax.memory import parse_bytes
        >>> parse_bytes("1.5 GiB"), parse_bytes("80GB")
        (1610612736, 80000000000)
    """
    if isinstance(size, bool) or not isinstance(size, (numbers.Real, str)):
        raise TypeError(f"a size is a number of bytes or a text such as '64MiB', not {size!r}")
    match = _SIZE.fullmatch(str(size))
    unit = match and {**_UNITS, **_BINARY_UNITS}.get(match[2].lower())
    try:
        value = float(match[1]) * unit if match and unit else 0.0
    except ValueError:
        value = 0.0
    if value < 1:
        raise ValueError(f"{size!r} is not a size of at least a byte: write for example '64MiB'")
    return int(value)


def show_bytes(size: float) -> str:
    """A number of bytes in the largest binary unit that leaves at least 1.

    Example:
        >>> from stackax.memory import show_bytes
        >>> show_bytes(67_108_864), show_bytes(12)
        ('64.0 MiB', '12 B')
    """
    for unit, bytes_of_unit in reversed(_BINARY_UNITS.items()):
        if abs(size) >= bytes_of_unit:
            return f"{size / bytes_of_unit:.1f} {unit.capitalize()}B"
    return f"{size:.0f} B"


def bytes_of(aval: Any) -> int:
    """The bytes of a value of type `aval`, or of anything with a shape and a dtype."""
    return math.prod(getattr(aval, "shape", ())) * itemsize_of(aval)


def itemsize_of(aval: Any) -> int:
    """The bytes of one entry of a value of type `aval`; none of what is no array."""
    return getattr(getattr(aval, "dtype", None), "itemsize", 0)
