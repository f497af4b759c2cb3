"""Options of a command line: how values are read, and how mistakes are answered in one line."""

import argparse
import math
import re
from collections.abc import Callable
from typing import NoReturn

from .._policy.policy import ScanCheckpointPolicy
from .._policy.presets import PRESETS
from ..memory import parse_bytes

POLICIES = (
    "none or save_all (keep everything), full (each layer's input), slots=K or nested (some of "
    "these inputs), offload (these inputs, in the host's memory), or a preset, which keeps values "
    f"by their names: {', '.join(PRESETS)}"
)


class Help(argparse.HelpFormatter):
    """Help in which the name of a command stands in one line with its description."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = 13  # argparse forgets that commands are indented


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line long."""

    def error(self, message: str) -> NoReturn:
        hint = (
            f": type {self.prog} --help" if message.startswith(("unrec", "the following")) else ""
        )
        self.exit(2, f"{self.prog}: error: {message}{hint}\n")


def whole(least: int) -> Callable[[str], int]:
    """A reader of whole numbers.

    Args:
        least: The smallest one that is accepted.

    Returns:
        A `type` for `ArgumentParser.add_argument`.

    Example:
        >>> from stackax._commands.options import whole
        >>> whole(1)("12")
        12
    """

    def read(typed: str) -> int:
        if not re.fullmatch(r"[0-9]+", typed) or int(typed) < least:
            raise argparse.ArgumentTypeError(
                f"{typed!r} is not a whole number of at least {least}: type for example {least + 4}"
            )
        return int(typed)

    return read


def positive(typed: str) -> float:
    """Reads a positive number, as a `type` for `ArgumentParser.add_argument`.

    Example:
        >>> from stackax._commands.options import positive
        >>> positive("3e-3")
        0.003
    """
    try:
        value = float(typed)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{typed!r} is not a positive number: type for example 0.003"
        )
    return value


def size_in_bytes(typed: str) -> int:
    """Reads a size, as a `type` for `ArgumentParser.add_argument`.

    Example:
        >>> from stackax._commands.options import size_in_bytes
        >>> size_in_bytes("64MiB")
        67108864
    """
    try:
        return parse_bytes(typed)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def policy_name(typed: str) -> str:
    """Checks the name of a policy, as a `type` for `ArgumentParser.add_argument`.

    Example:
        >>> from stackax._commands.options import policy_name
        >>> policy_name("full")
        'full'
    """
    try:
        ScanCheckpointPolicy.from_bool_or_str(typed)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return typed


def as_typed(message: str, options: dict[str, str]) -> str:
    """A message about fields of the library, in terms of the options that set them.

    Args:
        message: A message that speaks of `field=value`.
        options: The option for each field.

    Returns:
        The message, speaking of `--option value`.

    Example:
        >>> from stackax._commands.options import as_typed
        >>> as_typed("kv_heads=3 does not divide heads=4", {"heads": "--heads", "kv_heads": "--kv"})
        '--kv 3 does not divide --heads 4'
    """
    fields = "|".join(options)
    return re.sub(rf"\b({fields})=", lambda field: f"{options[field[1]]} ", message)
