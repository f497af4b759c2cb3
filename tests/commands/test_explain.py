"""`python -m stackax explain`, run in this process."""

import json

import pytest

from stackax.__main__ import main
from stackax._policy import lower

SMALL = "--layers 3 --width 16 --heads 2 --kv-heads 1 --seq-len 8 --batch 4".split()
# One value of one layer, (4, 8, 16) in float32.
CARRY = 4 * 8 * 16 * 4


def explain(capsys, *options):
    """The report, read back from JSON."""
    assert main(["explain", *SMALL, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def kept(report):
    """The named values and their bytes."""
    return {r["name"]: r["bytes"] for r in report["residuals"] if r["name"]}


def test_every_size_reaches_the_report(capsys):
    report = explain(capsys, "--remat", "save_qkv_proj")
    assert kept(report) == {
        "query_proj": 3 * CARRY,
        "key_proj": 3 * CARRY // 2,
        "value_proj": 3 * CARRY // 2,
    }
    half = explain(capsys, "--remat", "save_qkv_proj", "--dtype", "bfloat16")
    assert kept(half)["query_proj"] == 3 * CARRY // 2


def test_the_table_names_what_is_kept_and_the_sizes(capsys):
    assert main(["explain", *SMALL, "--remat", "slots=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3 transformer layers of width 16, 2 heads, 4 x 8 positions, float32")
    assert "remat slots=2" in out and "carry" in out and "forward pass runs" in out


def test_a_block_of_mlps_keeps_no_attention(capsys):
    report = explain(capsys, "--block", "mlp")
    assert "mlpwi_0" in report["names"] and "query_proj" not in report["names"]


def test_the_picture_is_written(capsys, tmp_path):
    path = tmp_path / "kept.svg"
    explain(capsys, "--plot", str(path))
    assert path.read_text().startswith("<?xml")


def test_a_warning_becomes_a_note_of_one_line(capsys):
    lower._warn_once.cache_clear()  # Once in a process, so that this one has to start anew.
    assert main(["explain", *SMALL, "--remat", "offload"]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 1 and notes[0].startswith("note: this backend's host memory")


@pytest.mark.parametrize(
    "typed, needles",
    [
        ("--layers 0", ["--layers", "'0' is not a whole number of at least 1"]),
        ("--heads 5", ["--heads 5 does not divide --width 128"]),
        ("--remat ful", ["--remat", "'ful'", "'full'"]),
        ("--block mlp --remat save_qkv_proj", ["query_proj", "mlpwi_0"]),
        ("--block lstm", ["--block", "'transformer'", "'mlp'"]),
        ("--plot kept", ["--plot", "kept.pdf"]),
        ("--plot nowhere/kept.pdf", ["--plot", "'nowhere' is not a folder"]),
    ],
)
def test_a_mistake_is_answered_in_one_line(capsys, typed, needles):
    with pytest.raises(SystemExit) as ended:
        main(["explain", *typed.split()])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1
    assert all(needle in lines[0] for needle in needles), lines[0]
