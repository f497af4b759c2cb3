"""What a command writes beside or instead of its table: pictures in files, and JSON."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plot._figure import new_figure
from .options import Parser

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_output(parser: Any, drawn: str) -> None:
    """Adds --json and --plot to a command.

    Args:
        parser: The command's parser.
        drawn: What --plot draws, and into what.
    """
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object instead")
    group.add_argument("--plot", help=f"draw {drawn}", type=picture_file, metavar="FILE")


def picture_file(typed: str) -> str:
    """Checks the name of a picture's file, as a `type` for `ArgumentParser.add_argument`.

    It does so before the work, so that no minute of measuring ends without its picture.
    """
    try:
        figure, _ = new_figure(height_inches=1)
    except ImportError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    path, kinds = Path(typed), figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise argparse.ArgumentTypeError(
            f"{typed!r} does not end in a kind of picture: type for example {path.stem}.pdf; "
            f"known: {', '.join(sorted(kinds))}"
        )
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{str(path.parent)!r} is not a folder: make it first")
    return typed


def save_picture(figure: "Figure", path: str, parser: Parser) -> None:
    """Writes a picture.

    Args:
        figure: The picture.
        path: What `picture_file` let through.
        parser: Where it is reported if the file can't be written.
    """
    try:
        figure.savefig(path)
    except OSError as error:
        parser.error(f"argument --plot: {error}")
