"""`python -m stackax explain`: the memory bill of a stack of given sizes."""

import json
from typing import Any

from ..memory import explain
from ..plot import plot_residuals
from .notes import notes
from .options import POLICIES, Parser, as_typed, policy_name
from .pictures import add_output, save_picture
from .sizes import OPTIONS, add_sizes, described, loss, stack_and_input


def add_explain(commands: Any) -> None:
    """Adds the command to those of a command line.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = commands.add_parser(
        "explain",
        help="print what the backward pass keeps, and what a step needs",
        description=(
            "Prints the memory bill of one training step, the value and the gradients, of a stack "
            "of blocks: every value that the backward pass keeps, the estimated peak, and what is "
            "recomputed. Nothing is compiled and nothing is allocated."
        ),
    )
    parser.set_defaults(run=lambda typed: run(typed, parser))
    add_sizes(parser)
    group = parser.add_argument_group("policy")
    group.add_argument(
        "--remat",
        default="none",
        help=f"what the backward pass keeps: {POLICIES} (default: none)",
        type=policy_name,
        metavar="POLICY",
    )
    add_output(parser, "what is kept, by name, into a file such as kept.pdf")


def run(typed: dict[str, Any], parser: Parser) -> int:
    """Explains the stack of the options.

    Args:
        typed: The options.
        parser: Where mistakes in them are reported.

    Returns:
        The exit status, 0.
    """
    try:
        stack, x = stack_and_input(typed)
        with notes():
            report = explain(loss, stack, x, argnums=0, remat=typed["remat"])
    except ValueError as error:
        parser.error(as_typed(str(error), OPTIONS))
    if typed["json"]:
        print(json.dumps(report.to_dict()))
    else:
        print(f"{described(typed)}, remat {typed['remat']}\n\n{report}")
    if typed["plot"]:
        save_picture(plot_residuals(report), typed["plot"], parser)
    return 0
