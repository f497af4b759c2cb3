"""The command line, run in this process."""

import os
import re
import signal

import pytest

from stackax import ScanCheckpointPolicy
from stackax.__main__ import main
from stackax._commands import train as command
from stackax.lm import read_about

# As the model and the training of the tests of `stackax.lm`, whose compiled programs serve here.
SMALL = (
    "--layers 2 --width 16 --heads 2 --seq-len 8 --batch 4 --steps 20 --lr 0.01 --sample-tokens 20"
).split()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"it was the best of times, it was the worst of times; " * 40)
    return str(path)


@pytest.fixture
def train(text, tmp_path):
    """Runs `train` on a small text, saving below the test's own folder."""
    folder = str(tmp_path / "run")

    def run(*options):
        return main(["train", "--text", text, "--checkpoint", folder, *options])

    run.folder = folder
    return run


def complaint(capsys, *arguments):
    """The one line on standard error that a mistake is answered with."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1
    return lines[0]


def losses(output):
    return re.findall(r"validation loss.*?: ([0-9.]+) nats/byte", output)


def test_a_run_reports_both_losses_and_writes_a_sample(train, capsys):
    assert train(*SMALL) == 0
    out, err = capsys.readouterr()
    before, after = map(float, losses(out))
    assert after < before
    assert "text: 1 files, 0.00 MB" in out and "model: 2 layers of width 16" in out
    assert "a sample of 20 bytes:" in out
    assert "20/20" in err and "tokens/s" in err


def interrupt_saves(monkeypatch, times):
    """Has Ctrl-C typed while the first checkpoint is being written."""

    def save(*arguments, **about):
        for _ in range(times.pop(0) if times else 0):
            signal.raise_signal(signal.SIGINT)
        save_state(*arguments, **about)

    save_state = command.save_state
    monkeypatch.setattr(command, "save_state", save)


def test_ctrl_c_saves_and_a_resumed_run_ends_where_a_straight_one_does(train, capsys, monkeypatch):
    assert train(*SMALL) == 0
    straight = capsys.readouterr().out
    interrupt_saves(monkeypatch, [1])
    assert train(*SMALL, "--save-every", "7") == 130
    out, err = capsys.readouterr()
    assert "stopping after this step" in err and f"--checkpoint {train.folder} --resume" in out
    assert read_about(train.folder)["step"] == 8
    assert main(["train", "--checkpoint", train.folder, "--resume"]) == 0
    resumed = capsys.readouterr().out
    assert losses(resumed)[-1] == losses(straight)[-1]
    assert resumed.split("a sample")[1] == straight.split("a sample")[1]


def test_a_second_ctrl_c_stops_at_once_and_leaves_the_last_checkpoint(train, monkeypatch):
    interrupt_saves(monkeypatch, [0, 2])
    assert train(*SMALL, "--save-every", "7") == 130
    assert read_about(train.folder)["step"] == 7


def test_a_new_run_keeps_the_checkpoint_of_the_one_before(train, capsys):
    assert train(*SMALL) == 0
    assert train(*SMALL, "--sample-tokens", "0") == 0
    out, err = capsys.readouterr()
    assert "is now" in err and out.count("a sample of") == 1
    assert read_about(train.folder)["options"]["sample_tokens"] == 0
    names = sorted(os.listdir(train.folder))
    assert names == ["checkpoint.previous.safetensors", "checkpoint.safetensors"]


def test_a_resumed_run_on_other_text_says_so(train, tmp_path, capsys, monkeypatch):
    interrupt_saves(monkeypatch, [1])
    assert train(*SMALL, "--save-every", "7") == 130
    other = tmp_path / "other.txt"
    other.write_bytes(b"call me Ishmael. " * 99)
    assert main(["train", "--checkpoint", train.folder, "--resume", "--text", str(other)]) == 0
    assert "other text than the run began with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed, needles",
    [
        ("--layers 0", ["--layers", "'0' is not a whole number of at least 1"]),
        ("--steps 1e3", ["--steps", "'1e3' is not a whole number"]),
        ("--seed -1", ["--seed", "'-1' is not a whole number of at least 0"]),
        ("--lr fast", ["--lr", "'fast' is not a positive number", "0.003"]),
        ("--lr nan", ["--lr", "'nan' is not a positive number"]),
        ("--heads 5 --width 64", ["--heads 5 does not divide --width 64", "--heads 4"]),
        ("--heads 4 --kv-heads 3", ["--kv-heads 3 does not divide --heads 4", "--kv-heads 2"]),
        ("--remat ful", ["--remat", "'ful'", "'full'"]),
        ("--remat slots=0", ["--remat", "slots"]),
        ("--dtype half", ["--dtype", "'float32'", "'bfloat16'"]),
        ("--text nowhere.txt", ["--text", "nowhere.txt does not exist"]),
        ("--seq-len 9999999", ["--seq-len 9999999 needs", "give --seq-len"]),
        ("--resume --checkpoint nowhere", ["--resume", "nowhere", "--checkpoint DIR"]),
        ("--depth 3", ["unrecognized arguments: --depth", "--help"]),
    ],
)
def test_a_mistake_is_answered_in_one_line_with_what_to_type(capsys, typed, needles):
    line = complaint(capsys, "train", *typed.split())
    assert all(needle in line for needle in needles), line


def test_no_command_is_a_mistake_too(capsys):
    assert "python -m stackax --help" in complaint(capsys)


def test_resuming_with_other_sizes_says_which_and_what_to_do(train, capsys):
    assert train(*SMALL) == 0
    capsys.readouterr()
    arguments = ["train", "--checkpoint", train.folder, "--resume"]
    line = complaint(capsys, *arguments, "--width", "32")
    assert "--width 32 is not that of the run in" in line and "--width 16" in line
    line = complaint(capsys, *arguments)
    assert "--steps 20 are done" in line and "type --steps 40" in line


def test_a_loss_that_is_not_a_number_stops_the_run_and_is_not_saved(train, capsys, monkeypatch):
    def diverging(state, corpus, training):
        for state, loss in steps(state, corpus, training):
            yield state, loss * float("nan" if state.step > 7 else 1)

    steps = command.train
    monkeypatch.setattr(command, "train", diverging)
    with pytest.raises(SystemExit):
        train(*SMALL, "--save-every", "3")
    err = capsys.readouterr().err
    assert "the loss is nan at step 9: type a smaller rate than --lr 0.01" in err
    assert read_about(train.folder)["step"] == 6


@pytest.mark.parametrize("command", [[], ["train"]])
def test_help_fits_a_terminal_and_names_every_default(capsys, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and max(map(len, out.splitlines())) <= 80
    assert out.count("(default") == (15 if command else 0)


def test_every_option_reaches_the_run(text):
    typed = dict(layers=2, width=24, heads=4, kv_heads=1, seq_len=6, dtype="bfloat16", batch=3)
    typed |= dict(remat="slots=1", steps=9, lr=0.5, seed=7, text=[text])
    job = command._prepare(typed)
    decoder, training = job.state.decoder, job.training
    sizes = ("layers", "width", "heads", "kv_heads", "seq_len")
    assert all(getattr(decoder.config, name) == typed[name] for name in sizes)
    assert decoder.stack.gradient_checkpointing == ScanCheckpointPolicy(slots=1)
    assert (decoder.dtype, training.dtype) == ("bfloat16", "bfloat16")
    assert (training.batch, training.steps) == (3, 9)
    assert (training.learning_rate, training.seed, job.corpus.files) == (0.5, 7, 1)
