"""How often a block must be evaluated when only k carries may be kept: closed form and search."""

import functools as ft
from math import comb


def optimal_evaluations(n: int, k: int) -> int:
    """The least number of evaluations of a block in forward plus backward pass.

    n for the forward pass, n inside the n vector-Jacobian products, and the advances from a kept
    carry to the one that is needed. With k carries, at most C(k + r, r + 1) layers can be advanced
    over exactly r times in the backward pass, so the layers are counted off from r = 0 (Griewank
    & Walther 2000, algorithm 799, where the forward pass places the first k carries).

    Args:
        n: layers.
        k: carries that may be kept at once, the first one included.

    Returns:
        The number of evaluations.
    """
    left, advances, r = n, 0, 0
    while left:
        here = min(left, comb(k + r, r + 1))
        advances += r * here
        left -= here
        r += 1
    return 2 * n + advances


def searched_evaluations(n: int, k: int) -> int:
    """The same number by trying every placement of every carry."""
    return 2 * n + _advances_after_forward(n, k)


def smallest_slots_within(n: int, evaluations: int) -> int:
    """The smallest k whose optimum stays within a number of evaluations."""
    return next(k for k in range(1, n + 1) if optimal_evaluations(n, k) <= evaluations)


@ft.cache
def _advances_after_forward(n: int, k: int) -> int:
    # The forward pass ran over all n layers and kept a carry wherever we asked it to.
    if n <= 1:
        return 0
    if k == 1:
        return _advances(n, 1)
    return min(_advances_after_forward(n - m, k - 1) + _advances(m, k) for m in range(1, n))


@ft.cache
def _advances(n: int, k: int) -> int:
    # Only the carry at the front of these n layers is kept; k - 1 places are free.
    if n <= 1:
        return 0
    if k == 1:
        return n * (n - 1) // 2
    return min(m + _advances(n - m, k - 1) + _advances(m, k) for m in range(1, n))
