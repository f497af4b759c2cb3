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

    def run_step(index: int, carry: Arrays) -> tuple[Arrays, list[Arrays]]:
        carry, output = steps[index](carry)
        return carry, [output]

    def run_spans(spans: Sequence[Span], carry: Arrays) -> tuple[Arrays, list[Arrays]]:
        outputs = []
        for span in spans:
            carry, more = run_span(span, carry)
            outputs += more
        return carry, outputs

    def run_span(span: Span, carry: Arrays) -> tuple[Arrays, list[Arrays]]:
        """Runs a span of which the backward pass is to have the carry-in alone."""

        def run(carry: Arrays) -> tuple[Arrays, list[Arrays]]:
            if span.children:
                return run_spans(span.children, carry)
            # No slot is left: the last step starts over from the span's carry-in, and so does the
            # span before it.
            outputs = []
            if span.steps > 1:
                carry, outputs = run_span(Span(span.start, span.stop - 1), carry)
            carry, last = run_step(span.stop - 1, carry)
            return carry, outputs + last

        name = f"{carry_name}[{span.start}:{span.stop}]"
        return checkpoint(run, policy, carry_name=name, prevent_cse=True)(carry)

    if tree is None:
        return run_spans([Span(i, i + 1) for i in range(len(steps))], init)
    return run_spans(tree.children or (tree,), init)
