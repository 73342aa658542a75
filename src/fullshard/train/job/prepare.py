"""Checks before any worker starts, so that a wrong option fails at once with one line."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import numpy as np

from fullshard.errors import ConfigError
from fullshard.plan import in_bytes
from fullshard.train.architecture import choose_architecture, count_parameters, load_text_for
from fullshard.train.config import TrainConfig
from fullshard.train.data import Packed, Rows, TokenizedText
from fullshard.train.extras import imported
from fullshard.train.job.planned import tell_plan
from fullshard.train.optimizer import described
from fullshard.train.run import (
    Origin,
    RunDir,
    check_continues,
    check_tracker,
    describe,
    locked,
    read_origin,
    say,
)


def prepare(config: TrainConfig, *, num_workers: int) -> TextIO:
    """Choose the model, tokenize the text, check that the run can start, create its folder.

    A start without ``resume`` moves the files of an earlier run in the folder aside.

    Returns:
        The locked file that keeps other jobs out of the folder; close it when the job has ended.

    Raises:
        ConfigError: model, text, initial weights, a package or a checkpoint to resume is missing
            or unusable. Other reasons: the text is too short, ``replicas`` does not divide the
            workers, the export folder exists, or the folder is locked or not writable.
    """
    if num_workers % config.replicas:
        raise ConfigError(
            f"--replicas is {config.replicas}, it must divide the {_count(num_workers, 'worker')}"
        )
    if config.min_workers is not None and config.min_workers > num_workers:
        raise ConfigError(
            f"--min-workers is {config.min_workers}, and there are only "
            f"{_count(num_workers, 'worker')}"
        )
    run = RunDir(Path(config.out))
    newest = run.newest_checkpoint()
    if config.resume and newest is None:
        raise ConfigError(f"{run.path} holds no checkpoint to resume: start without --resume")
    _check_extras(config)
    architecture = choose_architecture(config)
    num_parameters = count_parameters(architecture, config)
    if config.init is not None and not [*Path(config.init).glob("*.safetensors")]:
        raise ConfigError(f"--init {config.init}: there is no *.safetensors in it")
    text = load_text_for(architecture, config)
    _tell_left_out(text)
    _check_enough(config, text, num_workers)
    after = 0
    info = None if newest is None or not config.resume else read_origin(newest)
    config, length = with_steps(config, text, info, num_workers=num_workers)
    if newest is not None and info is not None:
        ours = describe(
            config, architecture.description(), text_key=text.key, num_workers=num_workers
        )
        check_continues(config, ours, newest, info)
        after = info.step
        if info.sequences_per_step != ours.sequences_per_step:
            _note(
                f"{newest} was trained on {info.sequences_per_step} sequences a step, now "
                f"{ours.sequences_per_step}: the losses differ from those of one run"
            )
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        lock = locked(run.lock)
        _tell_changed(config, run)
        _tell_patience(config)
        aside = run.set_aside(resumes=config.resume)
        config.save(run.config)
        if config.init is None:
            text.tokenizer.save(str(run.tokenizer))
    except OSError as error:
        raise ConfigError(f"--out {config.out}: cannot be written ({error})") from error
    if aside is not None:
        what = "the trace of an earlier start" if config.resume else "an earlier run"
        say(f"{run.path} held {what}; it lies in {aside} now")
    say(
        f"training {config.model} ({num_parameters:,} parameters) on "
        f"{_count(text.num_documents, 'document')} ({in_bytes(text.nbytes)}, "
        f"{len(text.train.tokens):,} tokens), {_count(num_workers, 'worker')}, run {run.path}"
    )
    say(f"schedule: {length}; learning rate {described(config)}")
    tell_plan(config, architecture, num_workers=num_workers, path=run.plan, after=after)
    return lock


_OF_THE_SCHEDULE = tuple(
    "epochs steps lr muon_lr lr_schedule warmup betas weight_decay clip".split()
)
_OF_THE_ROWS = ("seq", "seed", "pack")


def _tell_changed(config: TrainConfig, run: RunDir) -> None:
    """Print a note if a resumed run gets another schedule than before, or reads other rows."""
    if not config.resume or not run.config.exists():
        return
    earlier = TrainConfig.load(run.config)
    for names, so in (
        (
            _OF_THE_SCHEDULE,
            "the remaining steps follow the new schedule, those before followed the old one",
        ),
        (_OF_THE_ROWS, "the remaining steps may repeat or leave out rows of the text"),
    ):
        changed = [
            f"--{name.replace('_', '-')} was {_shown(earlier, name)} and is "
            f"{_shown(config, name)} now"
            for name in names
            if getattr(earlier, name) != getattr(config, name)
        ]
        if changed:
            _note(f"{', '.join(changed)}: {so}")


def _shown(config: TrainConfig, name: str) -> str:
    value = getattr(config, name)
    return "not given" if value is None else f"{value:g}" if name == "epochs" else str(value)


def with_steps(
    config: TrainConfig, text: TokenizedText, info: Origin | None, *, num_workers: int
) -> tuple[TrainConfig, str]:
    """Return ``config`` with the steps of its epochs, and their number in words.

    A resumed run keeps the number of steps of its first start, on any number of workers.

    Args:
        config: the configuration of this start.
        text: the text of the run.
        info: facts of the checkpoint to resume from; None for a new run.
        num_workers: number of workers of this start.

    Raises:
        ConfigError: a resumed run has new epochs, but its earlier steps read other rows.
    """
    if config.epochs is None:
        return config, _count(config.steps, "step")
    words = f"--epochs {config.epochs:g}"
    per_step = config.batch * config.accumulate * num_workers
    if info is not None:
        earlier = TrainConfig.load(RunDir(Path(config.out)).config)
        if earlier.epochs == config.epochs:
            as_before = f"{_count(earlier.steps, 'step')} ({words} at the first start)"
            return replace(config, steps=earlier.steps), as_before
        if (info.sequences_per_step, earlier.seq) != (per_step, config.seq):
            raise ConfigError(
                f"{words}: the run so far read {info.sequences_per_step} sequences of "
                f"{earlier.seq} tokens a step, and would read {per_step} of {config.seq} now, so "
                "its epochs cannot be counted: give --steps, or --batch, --accumulate and --seq of "
                "the run"
            )
    rows = len(text.train.rows(config.seq))
    steps = max(1, math.ceil(round(config.epochs * rows / per_step, 6)))
    of = f"{rows:,} sequences of {config.seq} tokens, {per_step:,} a step"
    return replace(config, steps=steps), f"{_count(steps, 'step')} ({words} of {of})"


def _check_extras(config: TrainConfig) -> None:
    """Raise ``ConfigError`` if the end of the run would fail, or a package is missing."""
    if config.lora is not None:
        imported("peft", "--lora", extra="lora")
    if config.quantize is not None:
        imported("bitsandbytes", "--quantize", extra="qlora")
    check_tracker(config)
    if config.export is not None and os.path.exists(config.export):
        raise ConfigError(f"--export {config.export}: is there already; give a new folder")
    if config.export is not None:
        target, out = Path(config.export).resolve(), Path(config.out).resolve()
        if target in (out, *out.parents):
            raise ConfigError(
                f"--export {config.export}: the run will be there or below; give another folder"
            )
        above = next(one for one in target.parents if os.path.exists(one))
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            raise ConfigError(f"--export {config.export}: no folder can be made in {above}")
    if config.data is not None and Path(config.data).resolve() == Path(config.out).resolve():
        raise ConfigError(f"--out {config.out}: the text is there; give another folder")


def _note(text: str) -> None:
    """Print a note on stderr."""
    say(f"fullshard: note: {text}", sys.stderr)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _check_enough(config: TrainConfig, text: TokenizedText, num_workers: int) -> None:
    needed = config.batch * config.accumulate * num_workers
    rows = text.train.rows(config.seq)
    found = len(rows)
    if found < needed:
        raise ConfigError(
            f"too little text: {found} sequences of {config.seq} tokens, and one step of "
            f"{_count(num_workers, 'worker')} needs {needed}: give more --data, or lower --batch, "
            "--accumulate or --seq"
        )
    if len(text.held_out.rows(config.seq)) < 1:
        raise ConfigError(
            f"too little text to hold any out: an evaluation needs {config.seq + 1} tokens, and a "
            f"sixteenth of the text has {len(text.held_out.tokens)}: give more --data, or lower "
            "--seq"
        )
    _tell_cut(rows, config.seq)


def _tell_patience(config: TrainConfig) -> None:
    """Print a note if ``patience`` exceeds the evaluations of the run."""
    before_the_last = (config.steps - 1) // config.eval_every
    if config.patience is not None and config.patience >= before_the_last:
        _note(
            f"--patience {config.patience} cannot end this run, which has "
            f"{_count(before_the_last, 'evaluation')} before its last step"
        )


def _tell_left_out(text: TokenizedText) -> None:
    """Print a note if files of the folder, or bad records, were not read."""
    if text.bad.count:
        _note(f"{_count(text.bad.count, 'bad record')} of --data left out: {text.bad}")
    if text.left_out:
        _note(f"these files of --data are not read: {', '.join(text.left_out)}")


def _tell_cut(rows: Rows, seq: int) -> None:
    """Print a note if samples are longer than a row, or a row has only one."""
    if isinstance(rows, Packed) and rows.alone:
        share = rows.num_learned(np.arange(len(rows))) / (len(rows) * seq)
        _note(
            "each chat has a row of its own (--no-pack, or a model without position_ids); "
            f"{share:.0%} of the tokens in rows are learned. A smaller --seq wastes less"
        )
    if isinstance(rows, Packed) and rows.num_cut:
        _note(
            f"{_count(rows.num_cut, 'chat')} longer than {seq} tokens: the rest of each is not "
            "read; give a larger --seq"
        )
