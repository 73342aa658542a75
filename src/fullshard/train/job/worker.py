"""One worker of a job: join the process group, train, report the outcome.

``launch`` starts it as ``python -m fullshard.train.job CONFIG.json``. Under torchrun the command
calls ``work`` itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext, redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

import fullshard
from fullshard.errors import ConfigError, FullshardError, PeerError
from fullshard.train.architecture import Architecture, choose_architecture, load_text_for
from fullshard.train.config import TrainConfig
from fullshard.train.data import TokenizedText
from fullshard.train.job.export import export
from fullshard.train.job.planned import drift
from fullshard.train.job.prepare import prepare
from fullshard.train.job.sample import sample
from fullshard.train.loop import Trained, train
from fullshard.train.run import (
    RunDir,
    Saves,
    draw_loss,
    read_best,
    read_metrics,
    say,
    weights_key,
)
from fullshard.train.showing import showing_progress
from fullshard.train.world import LAUNCHER, World, join_world, speaks

Loaded = tuple[Architecture, TokenizedText]

_PREPARED = "fullshard/prepared"  # key in torchrun's store


def run_worker(config: TrainConfig, *, prepared: bool) -> None:
    """Train as one of the workers that the environment describes.

    Args:
        config: the configuration, the same on all workers.
        prepared: whether the launcher has called ``prepare``; if not, the first worker calls it.

    Raises:
        ConfigError: ``prepare`` refuses; raised on all workers.
    """
    loaded = _load_ahead(config)
    with join_world() as world:
        if config.min_workers is None:
            _work(_going_on(config, world), world, loaded, prepared=prepared)
        else:
            fullshard.resilient(
                partial(_live, config, world, loaded),
                max_restarts=config.nproc,
                min_world=config.min_workers,
            )


def _work(
    config: TrainConfig,
    world: World,
    loaded: Loaded | None,
    life: fullshard.Life | None = None,
    *,
    prepared: bool,
) -> None:
    text = _load_text(config, world, loaded)
    lock = None if prepared else world.agree(lambda: _prepare_first(config, world))
    if not prepared and config.epochs is not None:
        config = dataclasses.replace(config, steps=_num_steps(config, world))
    with lock or nullcontext():
        trained = train(config, text, world, life)
        _finish(config, text, trained, world)


def _num_steps(config: TrainConfig, world: World) -> int:
    """Return the number of steps in the first worker's file, which ``prepare`` wrote."""
    run = RunDir(Path(config.out))
    return int(world.rows(TrainConfig.load(run.config).steps if world.is_first else 0)[0].item())


def _live(config: TrainConfig, world: World, loaded: Loaded | None, life: fullshard.Life) -> None:
    """Train with the remaining workers, from the state in their memory or a checkpoint."""
    world = dataclasses.replace(world, rank=life.rank, size=life.world)
    if life.number:
        resumes = bool(Saves(config).steps())
        fits = world.size % config.replicas == 0
        replicas = config.replicas if fits else 1
        config = dataclasses.replace(config, resume=resumes, replicas=replicas)
    _work(config, world, loaded, life, prepared=True)


def _going_on(config: TrainConfig, world: World) -> TrainConfig:
    """Return ``config`` with ``resume`` set if torchrun restarted workers after a save.

    Only a save on the disk counts, because ``prepare`` reads the origin of the run from it.
    """
    has_prepared = world.is_first and world.kept is not None and world.kept.check([_PREPARED])
    began = has_prepared and RunDir(Path(config.out)).newest_checkpoint() is not None
    goes_on = world.rows(began)[0].any()
    return dataclasses.replace(config, resume=config.resume or bool(goes_on))


def _prepare_first(config: TrainConfig, world: World) -> TextIO | None:
    """Prepare on the first worker; the other workers wait for the result in ``World.agree``."""
    if not world.is_first:
        return None
    lock = prepare(config, num_workers=world.size)
    if world.kept is not None:
        world.kept.set(_PREPARED, "")  # for workers that torchrun starts later
    return lock


def _load(config: TrainConfig) -> Loaded:
    architecture = choose_architecture(config)
    return architecture, load_text_for(architecture, config)


def _load_ahead(config: TrainConfig) -> Loaded | None:
    """Load model and text before this worker joins the process group; return None on failure.

    Tokenizing may take longer than the time-out of the group. After a failure ``_load_text`` loads
    again, and reports the error on all workers.
    """
    with suppress(Exception):
        return _load(config)
    return None


def _load_text(config: TrainConfig, world: World, loaded: Loaded | None) -> TokenizedText:
    """Return the text, after checking that text and model are the same on all machines."""
    architecture, text = world.agree(lambda: loaded or _load(config))
    _check_same("--model", json.dumps(architecture.description(), sort_keys=True), world)
    _check_same("--data", text.key, world)
    if config.init is not None and (config.lora or not config.resume):
        key = world.agree(partial(weights_key, Path(config.init)))
        _check_same("--init", key, world)
    return text


def _check_same(option: str, content: str, world: World) -> None:
    """Raise ``ConfigError`` on all workers if their ``content`` is not the same."""
    digest = int.from_bytes(hashlib.sha256(content.encode()).digest()[:6])  # exact in fp64
    digests = world.rows(digest).flatten().tolist()
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise ConfigError(
                f"worker {rank} reads another {option} than worker 0: it must be the same on all "
                "machines"
            )


def _finish(config: TrainConfig, text: TokenizedText, trained: Trained, world: World) -> None:
    """Print a sample, export, draw the loss and print the paths of all output."""
    run = RunDir(Path(config.out))
    tell = say if world.is_first else lambda _: None
    out = shlex.quote(config.out)
    if config.trace:
        tell(f"trace        fullshard trace {out}  makes the report of this start")
    if trained.why_over is not None:
        tell(f"ended after step {trained.step} of {config.steps} by {trained.why_over}")
    elif trained.step < config.steps:
        tell(
            f"stopped after step {trained.step} of {config.steps}; "
            f"fullshard train --out {out} --resume  goes on"
        )
        return
    written = sample(trained.model, config, text, world)
    if config.export is not None:
        with showing_progress(enabled=world.is_first):
            export(trained.model, config, text.tokenizer, world, Path(config.export))
    if not world.is_first:
        return
    if written is not None:
        say(f"\na sample of what it writes now:\n\n{written}\n")
    if not draw_loss(run.metrics, run.picture):
        say("no picture is drawn: pip install matplotlib brings loss.png")
    bits = read_metrics(run.metrics)[-1].get("eval_bits_per_byte", math.nan)  # if not finite
    drawn = f", drawn in {run.picture}" if run.picture.exists() else ""
    say(f"metrics      {run.metrics}: {bits:.2f} held-out bits per byte at the end{drawn}")
    best = read_best(run)
    named = "" if best is None else f", {best.path} the best ({best.bits_per_byte:.2f})"
    say(f"checkpoints  {run.newest_checkpoint()} is the newest{named}")
    drifted = drift(run.plan, run.metrics, on_device=world.device.type != "cpu")
    if drifted is not None:
        say(f"plan         {drifted}")
    if config.export is not None:
        what = "model" if config.lora is None or config.merge else "adapters"
        say(f"exported     {config.export} holds the {what}")
    if config.data is None:
        say("next         fullshard train --name mine --data PATH  learns your own text")
    else:
        say("next         fullshard train --help  shows larger models and longer runs")


def work(config: TrainConfig, *, prepared: bool) -> NoReturn:
    """Call ``run_worker`` and exit this process: code 0, 1 on failure, 2 on a user error.

    The process exits at once, without finalizing the interpreter. After an error, finalization
    could hang in a process group in which other workers still wait, while the launcher waits for
    this worker. After success, gloo's threads, which outlive ``destroy_process_group``, sometimes
    abort when they need the interpreter after its finalization.
    """
    code = 0
    try:
        run_worker(config, prepared=prepared)
    except Exception as error:
        is_refusal = isinstance(error, FullshardError) and not isinstance(error, PeerError)
        code = 2 if is_refusal else 1
        _record(error, is_refusal=is_refusal)
        # Our own launcher shows the record instead; torchrun shows nothing.
        _tell(error, is_refusal=is_refusal, is_shown=not prepared)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run as a worker of ``launch``; the only argument is the configuration file of the run."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # before training, Ctrl-C ends it silently
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    work(TrainConfig.load(Path(sys.argv[1])), prepared=True)


def _end_with(launcher: int) -> None:
    """Exit this process when the launcher is gone: a killed launcher cannot end its workers.

    Otherwise the worker would keep writing into a run that the user may have resumed.
    """
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)


def _tell(error: Exception, *, is_refusal: bool, is_shown: bool) -> None:
    """Report the error of this worker to the other workers, and to the user if ``is_shown``."""
    if is_refusal:  # all workers refuse alike
        if is_shown and speaks():
            print(f"fullshard: error: {error}", file=sys.stderr)
        return
    # As for an uncaught exception: fullshard's hook reports the error to other ranks.
    with nullcontext() if is_shown else redirect_stderr(io.StringIO()):
        sys.excepthook(type(error), error, error.__traceback__)


def _record(error: Exception, *, is_refusal: bool) -> None:
    """Write the error to the file that launchers, both ours and torchrun, read."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(time.time_ns() // 1_000_000_000),
        # torchrun has only seconds; this clock is shared by all workers of a host, and never set.
        "time_ns": time.monotonic_ns(),
        "text": str(error) if is_refusal else f"{type(error).__name__}: {error}",
        "is_refusal": is_refusal,
    }
    message = {"message": details["text"], "extraInfo": details}
    Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
