"""The table of policies in the documentation has the figures that the library has today."""

import jax
import pytest

from benchmarks import render
from stackax._commands.sizes import DEFAULTS, loss, stack_and_input
from stackax.memory import explain
from stackax.memory._measure import compiled_bytes
from tests.zoo import KEEPS_BARRIERS

# Those of benchmarks/policies.py, which is a script and can't be imported from here.
SIZES = {**DEFAULTS, "layers": 48, "batch": 4}
FIGURES = render.read_results()["policies"][-1]["figures"]
POLICIES = render.policies_of(FIGURES)


def test_the_table_is_what_the_result_renders_to():
    page = render.POLICIES_PAGE.read_text(encoding="utf-8")
    expected = render.rendered(page, render.policies_table)
    assert page == expected, "run `python benchmarks/render.py`"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_tables_bytes_and_work_are_those_of_the_trace(policy):
    stack, x = stack_and_input(SIZES)
    bill = explain(loss, stack, x, argnums=0, remat=policy)
    assert bill.kept_bytes == pytest.approx(FIGURES[f"kept_bytes_{policy}"], rel=0.01)
    assert bill.forward_evaluations == pytest.approx(
        FIGURES[f"forward_evaluations_{policy}"], rel=0.005
    )
    assert bill.recomputed_flops / bill.flops == pytest.approx(
        FIGURES[f"recomputed_share_{policy}"], abs=0.002
    )


# Passes of XLA decide the bytes, and LLVM takes most of the time.
@pytest.mark.skipif(not KEEPS_BARRIERS, reason="the table is of jax 0.12; 0.10 plans other bytes")
@pytest.mark.parametrize("policy", ["none", "minimal_with_context", "full", "nested"])
def test_the_tables_temporary_memory_is_the_compilers(policy):
    stack, x = stack_and_input(SIZES)
    step = jax.jit(jax.value_and_grad(loss), compiler_options={"xla_backend_optimization_level": 0})
    compiled = step.lower(stack.with_policy(policy), x).compile()
    found = compiled_bytes(compiled)["temp_bytes"]
    assert found == pytest.approx(FIGURES[f"temp_bytes_{policy}"], rel=0.03)
