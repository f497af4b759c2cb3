"""A Python loop over blocks that need not be alike, under the same policies."""

from collections.abc import Callable, Sequence

from .._policy.lower import checkpoint, warn_if_remat_is_undone
from .._policy.policy import ScanCheckpointPolicy
from .schedule import Span
from .step import Arrays

FlatStep = Callable[[Arrays], tuple[Arrays, Arrays]]


def run_unrolled(
    steps: Sequence[FlatStep],
    init: Arrays,
    *,
    tree: Span | None,
    policy: ScanCheckpointPolicy,
    carry_name: str,
) -> tuple[Arrays, list[Arrays]]:
    """The last carry, and the outputs of each step.

    Args:
        steps: Functions from a carry to the next carry and outputs, in the order of running.
        init: The first carry.
        tree: Which carries to keep, or None for all.
        policy: What the backward pass keeps of a step.
        carry_name: What a policy calls the carry.
    """
    if policy.recomputes and steps:
        warn_if_remat_is_undone()

    def rematerialised(f: Callable, name: str) -> Callable:
        return checkpoint(f, policy, carry_name=f"{carry_name}[{name}]", prevent_cse=True)

    def run_span(span: Span) -> Callable[[Arrays], tuple[Arrays, list[Arrays]]]:
        """The steps of a span, of which the backward pass has the carry-in alone."""
        # Where no slot is left, the steps before the last start over from the span's carry-in.
        rest = span.children or (Span(span.start, span.stop - 1), Span(span.stop - 1, span.stop))
        return lambda carry: run_spans(rest, carry)

    def run_spans(spans: Sequence[Span], carry: Arrays) -> tuple[Arrays, list[Arrays]]:
        outputs = []
        for span in spans:
            name = f"{span.start}:{span.stop}"
            if span.steps == 1:
                carry, output = rematerialised(steps[span.start], name)(carry)
                outputs.append(output)
            else:
                carry, more = rematerialised(run_span(span), name)(carry)
                outputs.extend(more)
        return carry, outputs

    if tree is None:
        return run_spans([Span(i, i + 1) for i in range(len(steps))], init)
    return run_span(tree)(init)
