"""`python -m stackax train`: a byte-level language model, trained on text."""

import argparse
import contextlib
import math
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.random as jr
from tqdm import tqdm

from .._axes import POSITION
from .._policy.policy import ScanCheckpointPolicy
from ..lm import (
    FILE_START,
    Corpus,
    TrainingConfig,
    TrainState,
    generate,
    load_state,
    next_token_loss,
    read_about,
    read_corpus,
    save_state,
    set_checkpoint_aside,
    train,
    training_windows,
    validation_loss,
)
from ..memory import explain, show_bytes
from ..transformer import TransformerConfig
from .options import POLICIES, Parser, as_typed, policy_name, positive, whole

# Without an option, a run takes one to two minutes on two cores. There, recomputing each layer is
# faster than keeping its internals: memory is what a small step waits for.
DEFAULTS = {
    "text": None,
    "layers": 4,
    "width": 128,
    "heads": 4,
    "kv_heads": None,
    "seq_len": 64,
    "remat": "full",
    "dtype": "float32",
    "batch": 16,
    "steps": 320,
    "lr": 4e-3,
    "seed": 0,
    "sample_tokens": 256,
    "checkpoint": "stackax-checkpoint",
    "save_every": 200,
}
# A run that goes on under others of these would not be the same run.
KEPT = ("layers", "width", "heads", "kv_heads", "seq_len", "dtype", "batch", "seed")
LOSS_EVERY = 10
TEMPERATURE = 0.8


class Job(NamedTuple):
    """A run that is ready to go: its options, and what they stand for."""

    options: dict[str, Any]
    resumed: bool
    corpus: Corpus
    training: TrainingConfig
    state: TrainState


def add_train(commands: Any) -> None:
    """Adds the command to those of a command line.

    Args:
        commands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = commands.add_parser(
        "train",
        help="train a byte-level language model on text",
        description=(
            "Trains a decoder-only transformer to predict the next byte of text, then prints its "
            "loss on text that it never saw and a sample of what it writes. Ctrl-C saves and stops."
        ),
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(run=lambda typed: run(typed, parser))
    _add_sizes(parser.add_argument_group("model"))
    _add_run(parser.add_argument_group("run"))


def run(typed: dict[str, Any], parser: Parser) -> int:
    """Trains as the options say.

    Args:
        typed: The options that were typed, by the names of `DEFAULTS`, and "resume".
        parser: Where mistakes in them are reported.

    Returns:
        The exit status: 0, or 130 where Ctrl-C stopped the run.
    """
    try:
        job = _prepare(typed)
        before = validation_loss(job.state.decoder, job.corpus)
    except (ValueError, OSError) as error:
        options = {name: "--" + name.replace("_", "-") for name in DEFAULTS}
        parser.error(as_typed(str(error), options | {"learning_rate": "--lr"}))
    _introduce(job, before)
    try:
        state, step = _train(job)
    except FloatingPointError as error:
        parser.error(f"{error}: type a smaller rate than --lr {job.options['lr']}")
    if step < job.training.steps:
        folder = shlex.quote(job.options["checkpoint"])
        where = f" --checkpoint {folder}" if "checkpoint" in typed else ""
        print(f"stopped after step {step} of {job.training.steps} and saved; to go on:")
        print(f"python -m stackax train{where} --resume")
        return 130
    _conclude(job, state)
    return 0


def _add_sizes(group) -> None:
    def add(option: str, help: str, **how) -> None:
        _add(group, option, help, **how)

    add("--layers", "number of blocks", type=whole(1), metavar="N")
    add("--width", "size of the residual stream", type=whole(1), metavar="N")
    add("--heads", "query heads; they divide the width", type=whole(1), metavar="N")
    add(
        "--kv-heads",
        "key and value heads; they divide the heads (default: as many)",
        type=whole(1),
        metavar="N",
    )
    add("--seq-len", "bytes that the model sees at a time", type=whole(1), metavar="N")
    add("--dtype", "what the blocks compute in", choices=("float32", "bfloat16"))
    add(
        "--remat",
        f"what the backward pass keeps: {POLICIES}",
        type=policy_name,
        metavar="POLICY",
    )


def _add_run(group) -> None:
    def add(option: str, help: str, **how) -> None:
        _add(group, option, help, **how)

    add(
        "--text",
        "files and folders to train on (default: the sources of Python's standard library)",
        nargs="+",
        metavar="PATH",
    )
    add("--batch", "sequences in a step", type=whole(1), metavar="N")
    add("--steps", "optimizer steps in all", type=whole(1), metavar="N")
    add("--lr", "learning rate at its peak", type=positive, metavar="RATE")
    add(
        "--seed",
        "decides the first weights, the order of the text and the sample",
        type=whole(0),
        metavar="N",
    )
    add("--sample-tokens", "bytes to write at the end", type=whole(0), metavar="N")
    add("--checkpoint", "folder to save in", metavar="DIR")
    add("--save-every", "steps from one save to the next", type=whole(1), metavar="N")
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run that the folder holds, and with its options where none is typed",
    )


def _add(group, option: str, help: str, **how) -> None:
    default = DEFAULTS[option.removeprefix("--").replace("-", "_")]
    shown = help if default is None else f"{help} (default: {default})"
    group.add_argument(option, help=shown, **how)


def _prepare(typed: dict[str, Any]) -> Job:
    resumed = typed.get("resume", False)
    options = _options_of_run(typed) if resumed else DEFAULTS | typed
    training = TrainingConfig(
        steps=options["steps"],
        batch=options["batch"],
        learning_rate=options["lr"],
        seed=options["seed"],
        dtype=options["dtype"],
    )
    sizes = ("layers", "width", "heads", "kv_heads", "seq_len")
    model = TransformerConfig(vocab_size=256, **{name: options[name] for name in sizes})
    corpus = _read(options["text"])
    policy = ScanCheckpointPolicy.from_bool_or_str(options["remat"])
    _make_folder(options["checkpoint"])
    if resumed:
        state, _ = load_state(options["checkpoint"], gradient_checkpointing=policy)
    else:
        state = TrainState.init(model, training, gradient_checkpointing=policy)
    return Job(options, resumed, corpus, training, state)


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"checkpoint={path} is not a folder that can be written ({error.strerror}): give "
            "another, such as checkpoint=run1"
        ) from error


def _read(paths: list[str] | None) -> Corpus:
    try:
        return read_corpus(paths)
    except (OSError, ValueError) as error:
        raise ValueError(f"argument --text: {error}") from error


def _options_of_run(typed: dict[str, Any]) -> dict[str, Any]:
    """The options of the run to go on with, with those that were typed in their place."""
    directory = typed.get("checkpoint", DEFAULTS["checkpoint"])
    try:
        about = read_about(directory)
    except OSError as error:
        raise ValueError(
            f"--resume: {error}; type the --checkpoint DIR of a run, or leave out --resume"
        ) from error
    if "options" not in about:
        raise ValueError(f"checkpoint={directory} was not written by this command")
    for name in KEPT:
        if name in typed and typed[name] != about["options"][name]:
            raise ValueError(
                f"{name}={typed[name]} is not that of the run in {directory}, "
                f"{name}={about['options'][name]}: leave it out to go on with that run, or leave "
                f"out --resume to begin another"
            )
    options = DEFAULTS | about["options"] | typed | {"checkpoint": directory}
    if options["steps"] <= about["step"]:
        raise ValueError(
            f"steps={options['steps']} are done: the run in {directory} is at step "
            f"{about['step']}; to go on, type steps={2 * about['step']}"
        )
    return options


def _introduce(job: Job, before: float) -> None:
    weights = sum(x.size for x in jax.tree.leaves(eqx.filter(job.state.decoder, eqx.is_array)))
    options, corpus, model = job.options, job.corpus, job.state.decoder.config
    print(
        f"text: {corpus.files} files, {corpus.train.size / 1e6:.2f} MB to train on, "
        f"{corpus.validation.size / 1e6:.2f} MB to validate on"
    )
    print(
        f"model: {model.layers} layers of width {model.width}, {weights:,} weights, "
        f"remat {options['remat']}, on {jax.default_backend()}"
    )
    _print_bill(job)
    print(f"validation loss before: {before:.3f} nats/byte", flush=True)
    if job.resumed and read_about(options["checkpoint"])["text"] != corpus.fingerprint:
        print("this is other text than the run began with: losses will differ", file=sys.stderr)


def _print_bill(job: Job) -> None:
    """What a step needs, from its trace: the weights and the optimizer's state are donated."""
    decoder, optimizer_state = job.state.decoder, job.state.optimizer_state
    windows = training_windows(job.corpus, decoder.config.seq_len, job.training, step=0)
    report = explain(next_token_loss, decoder, windows, argnums=0)
    state = sum(x.nbytes for x in jax.tree.leaves(eqx.filter(optimizer_state, eqx.is_array)))
    temp = report.peak.temp_bytes
    peak = report.peak.argument_bytes + report.gradient_bytes + state + temp
    kept = show_bytes(report.kept_bytes)
    if report.offloaded_bytes:
        kept += f" and on the host {show_bytes(report.offloaded_bytes)}"
    print(
        f"memory: weights {show_bytes(report.gradient_bytes)}, gradients as much, "
        f"optimizer state {show_bytes(state)}, kept for the backward pass {kept}"
    )
    print(f"estimated: temporary memory {show_bytes(temp)}, peak {show_bytes(peak)}")


def _train(job: Job) -> tuple[TrainState, int]:
    """Trains and saves, behind a progress bar; the step is short of the last after Ctrl-C."""
    step, state, saved = int(job.state.step), job.state, job.resumed
    with _interrupts() as asked_to_stop, _Progress(job, step) as progress:
        for step, (state, loss) in enumerate(train(state, job.corpus, job.training), step + 1):
            progress.show(step, loss)
            is_last = step == job.training.steps or asked_to_stop.is_set()
            is_saved = is_last or step % job.options["save_every"] == 0
            if (is_saved or step % LOSS_EVERY == 0) and not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {step}")
            if is_saved:
                if not saved and (aside := set_checkpoint_aside(job.options["checkpoint"])):
                    tqdm.write(f"the checkpoint of an earlier run is now {aside}", file=sys.stderr)
                _save(job, state)
                saved = True
            if is_last:
                break
    return state, step


class _Progress:
    """The progress bar of a run, with the loss and the speed since the first step's end."""

    def __init__(self, job: Job, step: int) -> None:
        self.job, self.first, self.began = job, step + 1, time.perf_counter()
        self.bar = tqdm(total=job.training.steps, initial=step, desc="train", unit="step")

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def show(self, step: int, loss: jax.Array) -> None:
        """Counts a step; every few, waits for its loss and shows it."""
        if step == self.first:
            loss.block_until_ready()
            self.began = time.perf_counter()
        elif step % LOSS_EVERY == 0 or step == self.job.training.steps:
            tokens = (step - self.first) * self.job.training.batch * self.job.options["seq_len"]
            rate = tokens / (time.perf_counter() - self.began)
            self.bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
        self.bar.update()


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts as ever."""
    asked = threading.Event()

    def ask(*_) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        tqdm.write("stopping after this step; Ctrl-C again stops at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _save(job: Job, state: TrainState) -> None:
    save_state(
        job.options["checkpoint"],
        state,
        job.training,
        options=job.options,
        text=job.corpus.fingerprint,
    )


def _conclude(job: Job, state: TrainState) -> None:
    print(f"saved in: {job.options['checkpoint']}")
    print(f"validation loss: {validation_loss(state.decoder, job.corpus):.3f} nats/byte")
    if count := job.options["sample_tokens"]:
        print(f"a sample of {count} bytes:\n{_sample(state, count, job.training.seed)}")


def _sample(state: TrainState, count: int, seed: int) -> str:
    prompt = hax.named([FILE_START], POSITION)
    key = jr.key(seed)
    tokens = generate(state.decoder, prompt, new_tokens=count, temperature=TEMPERATURE, key=key)
    text = bytes(tokens.array.tolist()[1:]).decode("utf-8", errors="replace")
    # Control characters could do anything to a terminal, and not every one can show all others.
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\n" for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    return shown.encode(encoding, errors="replace").decode(encoding)
