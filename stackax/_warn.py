"""Warnings that point at the caller's line."""

import sys
import warnings

_OURS = ("stackax", "equinox", "jax", "haliax")


def warn_caller(message: str) -> None:
    """Warns at the innermost frame that belongs to none of the libraries a stack is made of."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level + 1)
