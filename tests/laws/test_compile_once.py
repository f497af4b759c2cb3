"""Law: running a loop eagerly a second time compiles nothing."""

import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from stackax import BlockSeq, ScanCheckpointPolicy, Stacked, shared
from tests.zoo import NAMED_MLP, PLAIN_MLP, RECORDING, NamedMlp, layers


class _Compilations(logging.Handler):
    """Collects what jax says that it compiles."""

    def __init__(self):
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record):
        if record.getMessage().startswith("Compiling"):
            self.messages.append(record.getMessage())


@pytest.fixture
def compilations():
    """A function that runs something and returns what was compiled for it."""
    handler, logger = _Compilations(), logging.getLogger("jax")
    propagate = logger.propagate

    def run(f):
        handler.messages.clear()
        with jax.log_compiles():
            jax.block_until_ready(eqx.filter(f(), eqx.is_array))
        return list(handler.messages)

    logger.addHandler(handler)
    logger.propagate = False
    yield run
    logger.removeHandler(handler)
    logger.propagate = propagate


def eager_call(name: str):
    x, plain = NAMED_MLP.carry(jr.key(0)), PLAIN_MLP.carry(jr.key(0))
    named, thin = NAMED_MLP.stack(3), PLAIN_MLP.stack(3, ScanCheckpointPolicy(slots=2))
    recording, remat = RECORDING.stack(3), NAMED_MLP.stack(3, True)
    return {
        "fold": lambda: named.fold(x),
        "fold under remat": lambda: remat.fold(x),
        "fold with a schedule": lambda: thin.fold(plain),
        "fold with an argument": lambda: named.fold(x, shared(jnp.ones(()))),
        "fold with a policy per call": lambda: named.fold(x, remat="nested"),
        "scan": lambda: recording.scan(x),
        "fold_via": lambda: named.fold_via(NamedMlp.__call__)(x),
        "vmap": lambda: named.vmap(x),
    }[name]


CALLS = (
    "fold",
    "fold under remat",
    "fold with a schedule",
    "fold with an argument",
    "fold with a policy per call",
    "scan",
    "fold_via",
    "vmap",
)


@pytest.mark.parametrize("call", CALLS)
def test_a_second_eager_call_compiles_nothing(compilations, call):
    run = eager_call(call)
    compilations(run)
    assert compilations(run) == []


def test_the_first_eager_call_compiles_a_loop_once(compilations):
    """The counter counts: a fold of new shapes compiles one loop, whatever else it compiles."""

    class Fresh(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return jnp.sin(x * self.weight)

    stack = Stacked(Fresh(jnp.ones((11, 3))), layers(11), ScanCheckpointPolicy())
    x = jnp.ones(3)
    jax.block_until_ready(2 * x)
    first = compilations(lambda: stack.fold(x))
    assert len(first) == 1
    assert compilations(lambda: stack.fold(2 * x)) == []


def test_equal_stacks_share_one_compilation(compilations):
    """What is compiled belongs to the shapes, not to the object that holds the weights."""
    x = NAMED_MLP.carry(jr.key(0))
    NAMED_MLP.stack(3, seed=5).fold(x)
    other = NAMED_MLP.stack(3, seed=6)
    assert compilations(lambda: other.fold(x)) == []


def test_a_block_seq_compiles_nothing_the_second_time(compilations):
    x, seq = PLAIN_MLP.carry(jr.key(0)), PLAIN_MLP.stack(3, container=BlockSeq)
    compilations(lambda: seq.fold(x))
    assert compilations(lambda: seq.fold(x)) == []
