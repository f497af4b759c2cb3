"""From a policy to `jax.checkpoint`, of which this is the only caller."""

import functools as ft
import itertools
from collections.abc import Callable
from typing import Any

import jax

from .. import _jax
from .._warn import warn_caller
from .names import checkpoint_name
from .policy import ScanCheckpointPolicy

_SERIAL = itertools.count()


def checkpoint(
    step: Callable, policy: ScanCheckpointPolicy, *, carry_name: str, prevent_cse: bool
) -> Callable:
    """`step(carry, *args)`, whose backward pass keeps what `policy` says.

    Args:
        step: Takes the carry first; its carry and arguments are pytrees of arrays.
        policy: Its `nested` and `slots` are a loop's business, not a step's, and are ignored.
        carry_name: What the carry's name begins with. It is made unique: a policy sees the names
            in the loops inside its step, and must not take their carries for its own.
        prevent_cse: What to do where the policy leaves it to the loop.
    """
    if not policy.recomputes:
        return step
    offloads_carries = policy.save_carries == "offload"
    # Loops over axes of one name can be nested, each with its own step: no two names are equal.
    carry_name = f"{carry_name}#{next(_SERIAL)}"
    if offloads_carries or policy.offloaded_names:
        warn_if_host_is_device()

    def named_step(carry: Any, *args: Any):
        # Unnamed, the carry is kept because it is the step's input; a name is only needed to
        # tell where to keep it, and costs a copy of what it names.
        return step(checkpoint_name(carry, carry_name) if offloads_carries else carry, *args)

    return jax.checkpoint(
        named_step,
        policy=_saveable(policy, carry_name if offloads_carries else None),
        prevent_cse=prevent_cse if policy.prevent_cse is None else policy.prevent_cse,
    )


def warn_if_host_is_device() -> None:
    """Says, once, that an offload saves nothing where the host's memory is the device's."""
    if jax.default_backend() == "cpu":
        _warn_once(
            "this backend's host memory is its device memory: an offload stays in the program, "
            "and saves no bytes until the program runs on an accelerator."
        )


def warn_if_remat_is_undone() -> None:
    """Says, once, where XLA undoes rematerialisation outside a loop whatever JAX asks for."""
    if not _jax.barrier_survives_compilation():
        _warn_once(
            "this version of XLA drops optimization barriers on the CPU, so it merges the "
            "recomputation of a single layer or of an unrolled loop with the forward pass, and "
            "remat saves no memory there: use a stack of two layers or more without unroll, or "
            "jax 0.12 or newer."
        )


def _saveable(policy: ScanCheckpointPolicy, offloaded_carry: str | None) -> Callable | None:
    offloaded = policy.offloaded_names + ((offloaded_carry,) if offloaded_carry else ())
    if offloaded:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(policy.saved_names),
            names_which_can_be_offloaded=list(offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    if policy.saved_names:
        return jax.checkpoint_policies.save_only_these_names(*policy.saved_names)
    return None


@ft.cache
def _warn_once(message: str) -> None:
    warn_caller(message)
