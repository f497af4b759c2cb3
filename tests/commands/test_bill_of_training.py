"""What `python -m stackax train` says of memory before it starts."""

import re

import equinox as eqx
import jax
import pytest

from stackax._commands import train as command
from stackax.memory import parse_bytes


@pytest.fixture
def job(tmp_path):
    """A run that is ready to go."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"it was the best of times, it was the worst of times; " * 40)
    sizes = dict(layers=2, width=16, heads=2, seq_len=8, batch=4)
    return command._prepare(sizes | dict(text=[str(text)], checkpoint=str(tmp_path / "run")))


def sizes(line):
    """The sizes in a line, in order."""
    return [parse_bytes(size) for size in re.findall(r"[0-9.]+ [KMG]?i?B", line)]


def test_the_bill_is_two_lines_whose_parts_are_those_of_the_state(job, capsys):
    command._print_bill(job)
    parts, estimate = capsys.readouterr().out.splitlines()
    weights, state, kept = sizes(parts)
    temp, peak = sizes(estimate)

    def of(tree):
        return sum(x.nbytes for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))

    assert weights == pytest.approx(of(job.state.decoder), rel=0.01)
    assert state == pytest.approx(of(job.state.optimizer_state), rel=0.01)
    assert 0 < kept < temp
    # Beside them only the tokens of a step, 4 sequences of 9.
    assert peak == pytest.approx(2 * weights + state + temp + 4 * 9 * 4, rel=0.01)
