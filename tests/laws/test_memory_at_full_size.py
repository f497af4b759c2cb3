"""Law: the figures that the project promises, at the sizes that it promises them for.

An MLP block with a carry of 2 MiB and a hidden layer four times as wide, and a pre-norm transformer
block (width 256, 4 heads, sequence 256, batch 4). Programs are compiled and never run.
"""

import functools as ft

import haliax as hax
import haliax.nn
import jax.numpy as jnp
import pytest

from stackax import ScanCheckpointPolicy
from tests.laws.test_memory import Problem, temp
from tests.reference.programs import temp_bytes
from tests.zoo import Attention, PlainMlp, layers

MLP = Problem(ft.partial(PlainMlp, 512, 2048), (1024, 512))
TRANSFORMER = Problem(ft.partial(Attention, 256, 1024, 4), (4, 256, 256))


def carries(problem: Problem, n: int, policy) -> float:
    """Temporaries in units of one carry."""
    return temp(problem, n, policy) / problem.carry_bytes


@pytest.mark.parametrize("problem", [MLP, TRANSFORMER], ids=["mlp", "transformer"])
def test_the_promises_for_97_layers_hold(problem):
    assert problem.carry_bytes in (2**21, 2**20)
    simple = carries(problem, 97, True)
    few, many = (carries(problem, 97, ScanCheckpointPolicy(slots=k)) for k in (8, 16))
    assert 8 * 0.98 <= many - few <= 8 * 1.02
    # The working set of one block, weights' gradients included, is the rest.
    assert many <= 0.5 * simple


@pytest.mark.parametrize(
    "problem, least", [(MLP, 3.5), (TRANSFORMER, 8)], ids=["mlp", "transformer"]
)
def test_haliaxs_nesting_of_64_layers_costs_a_multiple_of_ours(problem, least):
    theirs_policy = haliax.nn.ScanCheckpointPolicy(nested=True)

    def loss(stacked, x):
        return jnp.sum(hax.nn.Stacked(stacked, layers(64), theirs_policy).fold(x) ** 2)

    theirs = temp_bytes(loss, problem.stacked(64), problem.carry)
    assert theirs >= least * temp(problem, 64, "nested")
