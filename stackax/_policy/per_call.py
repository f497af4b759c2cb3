"""The policy of one call of a container: that of the call, or the container's own."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from .._warn import warn_caller
from .policy import RematSpec, ScanCheckpointPolicy, as_policy

_TRIED = ContextVar("policies_tried", default=False)


def policy_of_call(own: ScanCheckpointPolicy, remat: RematSpec | None) -> ScanCheckpointPolicy:
    """The policy that a call's `remat` stands for; None means the container's `own`."""
    if remat is None:
        return own
    if _TRIED.get():
        warn_caller(
            f"this call is given remat={remat!r}, which wins over the policies that explain or "
            "plan try: leave it out, and give the stack its policy with with_policy."
        )
    return as_policy(remat)


@contextlib.contextmanager
def policies_tried(is_so: bool) -> Iterator[None]:
    """While `is_so`, a call that has a policy of its own is warned of: others are being tried."""
    token = _TRIED.set(is_so)
    try:
        yield
    finally:
        _TRIED.reset(token)
