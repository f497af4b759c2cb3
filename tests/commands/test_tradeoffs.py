"""`python -m stackax tradeoffs`, run in this process."""

import json

import pytest

from stackax import ScanCheckpointPolicy
from stackax.__main__ import main
from stackax._commands import rows as timing
from tests.zoo import platform_warnings_ignored

SMALL = "--block mlp --layers 4 --width 16 --heads 2 --seq-len 32 --batch 8".split()


def tradeoffs(capsys, *options):
    """The exit status and what is printed, read as JSON."""
    status = main(["tradeoffs", *SMALL, "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def test_rows_tell_memory_and_work_apart(capsys):
    status, found = tradeoffs(capsys, "--policies", "none", "minimal", "full", "slots=1")
    rows = {row["policy"]: row for row in found["rows"]}
    assert status == 0 and list(rows) == ["none", "minimal", "full", "slots=1"]
    order = list(rows.values())
    for more, less in zip(order, order[1:], strict=False):
        assert more["kept_bytes"] > less["kept_bytes"]
        assert more["compiled_temp_bytes"] > less["compiled_temp_bytes"]
        assert more["recomputed_flops"] < less["recomputed_flops"]
    assert rows["none"]["forward_evaluations"] == 1
    assert found["time_is_relative_to"] == "full" and rows["full"]["relative_time"] == 1
    assert all(row["seconds"] > 0 and row["compile_seconds"] > 0 for row in order)


def test_no_time_runs_nothing(capsys, monkeypatch):
    monkeypatch.setattr(timing, "_median_seconds", None)
    _, found = tradeoffs(capsys, "--policies", "full", "--no-time")
    assert found["rows"][0]["seconds"] is None and found["rows"][0]["relative_time"] is None


def test_the_usual_rows_have_one_of_each_kind(capsys, monkeypatch):
    monkeypatch.setattr(timing, "compiled_bytes", lambda step: {"temp_bytes": 1})
    monkeypatch.setattr(timing.jax, "jit", lambda f: Uncompiled())
    with platform_warnings_ignored():
        assert main(["tradeoffs", *SMALL, "--no-time"]) == 0
    out = capsys.readouterr().out
    policies = [line.split()[0] for line in out.splitlines() if line.rstrip().endswith(" s")]
    assert policies == ["none", "minimal", "full", "slots=2", "slots=1", "nested", "offload"]
    assert "on host" in out and "time" not in out


class Uncompiled:
    """What stands in for a jitted step whose figures don't matter."""

    def lower(self, *args):
        return self

    def compile(self):
        return None


def test_the_table_says_what_time_is_compared_with(capsys, tmp_path):
    path = tmp_path / "rows.pdf"
    assert main(["tradeoffs", *SMALL, "--policies", "minimal", "none", "--plot", str(path)]) == 0
    out = capsys.readouterr().out
    assert "time: of a step, over that of minimal, which takes" in out and "on host" not in out
    assert path.read_bytes().startswith(b"%PDF")


def test_a_budget_prints_the_plan_that_fits(capsys, tmp_path):
    path = tmp_path / "front.png"
    status, found = tradeoffs(capsys, "--budget", "1 MiB", "--verify", "--plot", str(path))
    assert status == 0 and found["fits"] and path.exists()
    assert found["compiled_peak_bytes"] <= found["budget_bytes"] == 1024 * 1024
    policy = eval(found["chosen"]["policy"], {"ScanCheckpointPolicy": ScanCheckpointPolicy})
    assert policy.recomputes


@pytest.mark.parametrize(
    "budget, needles", [("100KiB", ["Nothing fits"]), ("1KiB", ["--budget", "arguments alone"])]
)
def test_a_budget_that_nothing_fits_is_said_and_exits_with_1(capsys, budget, needles):
    assert main(["tradeoffs", *SMALL, "--budget", budget]) == 1
    out, err = capsys.readouterr()
    assert all(needle in out + err for needle in needles)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "typed, needles",
    [
        ("--budget lots", ["--budget", "'lots' is not a size", "64MiB"]),
        ("--verify", ["--verify", "--budget 64MiB"]),
        ("--budget 1GiB --no-time", ["--no-time", "--budget"]),
        ("--budget 1GiB --policies full", ["--policies", "--budget"]),
        ("--policies ful", ["--policies", "'ful'", "'full'"]),
        ("--kv-heads 3", ["--kv-heads 3 does not divide --heads 4"]),
    ],
)
def test_a_mistake_is_answered_in_one_line(capsys, typed, needles):
    with pytest.raises(SystemExit) as ended:
        main(["tradeoffs", *typed.split()])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1
    assert all(needle in lines[0] for needle in needles), lines[0]
