"""A config of another library, of which no key may be left unread."""

import math
from typing import Any

_MISSING = object()


class Keys:
    """The keys of a config, taken one by one."""

    def __init__(self, config: dict[str, Any], where: str = ""):
        self._left = dict(config)
        self._where = where

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """The value of a key, or `default` where there is none.

        Args:
            name: The key.
            default: What the library that wrote the config takes where the key is missing.

        Raises:
            ValueError: if the key is missing and has no default.
        """
        if name in self._left:
            return self._left.pop(name)
        if default is _MISSING:
            raise ValueError(f"the config has no {self._where}{name}, which the model needs")
        return default

    def require(self, name: str, wanted: Any, *others: Any) -> None:
        """Takes a key that may be missing, or have one of a few values.

        Args:
            name: The key.
            wanted: The value.
            *others: Values that mean the same.

        Raises:
            ValueError: if it has another one.
        """
        value = self.take(name, wanted)
        if value != wanted and value not in others:
            raise ValueError(
                f"the config says {self._where}{name}={value!r}, but only {wanted!r} can be read"
            )

    def ignore(self, *names: str) -> None:
        """Takes keys that say nothing about what the model computes.

        Args:
            *names: The keys, each of which may be missing.
        """
        for name in names:
            self._left.pop(name, None)

    def check_all_taken(self) -> None:
        """Refuses a config of which something was left over.

        Raises:
            ValueError: if a key was never taken.
        """
        if self._left:
            name = sorted(self._left)[0]
            more = f" (and {len(self._left) - 1} keys more)" if len(self._left) > 1 else ""
            raise ValueError(
                f"the config says {self._where}{name}={self._left[name]!r}{more}, of which the "
                "model knows nothing: take it out if it does not change what the model computes"
            )


def number(value: Any) -> float:
    """A number as JSON or transformers write it, infinity included.

    Args:
        value: A number, or `{"__float__": "Infinity"}`.

    Returns:
        The number.

    Example:
        >>> from stackax.weights._keys import number
        >>> number({"__float__": "Infinity"}), number(1)
        (inf, 1.0)
    """
    return float(value["__float__"]) if isinstance(value, dict) else float(value)


def spelled(value: float) -> Any:
    """`number`, the other way.

    Args:
        value: A number.

    Returns:
        What transformers writes for it.

    Example:
        >>> import math
        >>> from stackax.weights._keys import spelled
        >>> spelled(math.inf), spelled(0.5)
        ({'__float__': 'Infinity'}, 0.5)
    """
    return value if math.isfinite(value) else {"__float__": "Infinity"}
