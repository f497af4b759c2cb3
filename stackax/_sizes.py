"""Checks of the numbers in a config."""

import math


def check_size(name: str, value: int) -> None:
    """Raises unless `value` is a whole number of at least 1; `name` is the caller's for it."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}: give a whole number")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1: give {name}=1 or more")


def check_positive(name: str, value: float) -> None:
    """Raises unless `value` is a positive finite number."""
    if isinstance(value, str) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value} must be a positive finite number")
