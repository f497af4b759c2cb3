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
POLICIES = [
    "none",
    "minimal_with_context",
    "minimal",
    "save_qkv_proj",
    "full",
    "slots=16",
    "nested",
    "slots=4",
]


@pytest.fixture(scope="module")
def figures():
    return render.read_results()["policies"][-1]["figures"]


def test_the_table_is_what_the_result_renders_to():
    page = render.POLICIES_PAGE.read_text(encoding="utf-8")
    expected = render.rendered(page, render.policies_table)
    assert page == expected, "run `python benchmarks/render.py`"


def test_the_table_has_these_policies(figures):
    kept = [key for key in figures if key.startswith("kept_bytes_")]
    assert kept == [f"kept_bytes_{policy}" for policy in POLICIES]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_tables_bytes_and_work_are_those_of_the_trace(figures, policy):
    stack, x = stack_and_input(SIZES)
    bill = explain(loss, stack, x, argnums=0, remat=policy)
    assert bill.kept_bytes == pytest.approx(figures[f"kept_bytes_{policy}"], rel=0.01)
    assert bill.forward_evaluations == pytest.approx(
        figures[f"forward_evaluations_{policy}"], rel=0.005
    )
    assert bill.recomputed_flops / bill.flops == pytest.approx(
        figures[f"recomputed_share_{policy}"], abs=0.002
    )


# Passes of XLA decide the bytes, and LLVM takes most of the time.
@pytest.mark.skipif(not KEEPS_BARRIERS, reason="the table is of jax 0.12; 0.10 plans other bytes")
@pytest.mark.parametrize("policy", ["none", "minimal_with_context", "full", "nested"])
def test_the_tables_temporary_memory_is_the_compilers(figures, policy):
    stack, x = stack_and_input(SIZES)
    step = jax.jit(jax.value_and_grad(loss), compiler_options={"xla_backend_optimization_level": 0})
    compiled = step.lower(stack.with_policy(policy), x).compile()
    found = compiled_bytes(compiled)["temp_bytes"]
    assert found == pytest.approx(figures[f"temp_bytes_{policy}"], rel=0.03)
