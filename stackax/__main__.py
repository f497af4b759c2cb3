"""`python -m stackax`: one subcommand per job."""

import sys

from ._commands.explain import add_explain
from ._commands.options import Help, Parser
from ._commands.tradeoffs import add_tradeoffs
from ._commands.train import add_train


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line.

    Args:
        arguments: What follows `python -m stackax`. None means what was typed.

    Returns:
        The exit status: 0, or 1 where nothing fits a budget that was asked for, or 130 where
        Ctrl-C stopped the job. After a mistake in the arguments it exits with status 2 instead, and
        one line on standard error.

    Example:
        >>> from stackax.__main__ import main
        >>> main(["train", "--layers", "0"])
        Traceback (most recent call last):
            ...
        SystemExit: 2
    """
    parser = Parser(
        prog="python -m stackax",
        description="Deep stacks of layers for JAX. Each command has a --help of its own.",
        formatter_class=Help,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in (add_explain, add_tradeoffs, add_train):
        add_command(commands)
    typed = vars(parser.parse_args(arguments))
    try:
        return typed.pop("run")(typed)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
