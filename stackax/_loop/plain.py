"""One scan over the layers, its step rematerialised as the policy says."""

import jax

from .._policy.lower import checkpoint, warn_if_remat_is_undone
from .._policy.policy import ScanCheckpointPolicy
from .step import Arrays, Step


def run_plain(
    step: Step,
    per_layer: Arrays,
    shared: Arrays,
    *,
    length: int,
    policy: ScanCheckpointPolicy,
    reverse: bool,
    unroll: int,
    carry_name: str,
) -> tuple[Arrays, Arrays]:
    """The last carry and the stacked outputs, as arrays.

    Args:
        step: The function of one layer.
        per_layer: Arrays with the layers first.
        shared: Arrays that every layer gets whole.
        length: The number of layers.
        policy: What the backward pass keeps of a step.
        reverse: Whether to run from the last layer to the first.
        unroll: How many layers one trip of the loop runs.
        carry_name: What a policy calls the carry.
    """
    # XLA inlines a loop of one trip. Where the loop survives, forward and backward pass are two
    # loops that nothing can merge, and a barrier would only cost copies.
    survives = length >= 2 and unroll < length
    if policy.recomputes and length > 0 and not survives:
        warn_if_remat_is_undone()
    rematerialised = checkpoint(
        step, policy, carry_name=carry_name, prevent_cse=not survives or unroll > 1
    )

    def body(carry: Arrays, slices: Arrays) -> tuple[Arrays, Arrays]:
        return rematerialised(carry, slices, shared)

    return jax.lax.scan(body, step.init, per_layer, length=length, reverse=reverse, unroll=unroll)
