"""The training loop: shard, step, evaluate, save; start reading at ``train``."""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard
from fullshard.checkpoint import load_weights
from fullshard.errors import ConfigError, NonFiniteError
from fullshard.optim import StepGuard
from fullshard.progress import on_progress
from fullshard.train.architecture import Architecture, choose_architecture, next_token_logits
from fullshard.train.config import Dtype, LayoutName, TrainConfig
from fullshard.train.data import Feed, Packed, TokenizedText
from fullshard.train.evaluation import Evaluation, training_loss
from fullshard.train.optimizer import build_optimizer, set_learning_rate, set_options
from fullshard.train.run import (
    HeldOut,
    Reporter,
    RunDir,
    Saves,
    StepRecord,
    Stopping,
    check_continues,
    describe,
    device_nbytes,
    drop_after,
    end_wire_check,
    origin_of,
    peak_memory_nbytes,
    planned_flops,
    recording,
    shard_nbytes,
    stopping,
    tracker_of,
)
from fullshard.train.showing import showing_progress
from fullshard.train.tune import add_adapters, conversions, quantize_linears
from fullshard.train.world import HostRows, World

# Differences up to this share of the largest logit count as rounding, not as a leak of samples.
# Mixtures of experts may add in another order. A real leak changes logits by about their size.
_ROUNDING = {Dtype.FP32: 2.0**-17, Dtype.BF16: 2.0**-5}


class Trained(NamedTuple):
    """The trained model, still sharded, and its last step.

    Attributes:
        why_over: reason of the end before ``config.steps``; None if the run is complete, or can
            be resumed.
    """

    model: nn.Module
    step: int
    why_over: str | None


def train(
    config: TrainConfig,
    text: TokenizedText,
    world: World,
    life: fullshard.Life | None = None,
) -> Trained:
    """Train to ``config.last_step``, from scratch or from the newest state.

    If any worker gets SIGTERM or SIGINT, all workers save and end after the current step.
    """
    run = RunDir(Path(config.out))
    with showing_progress(enabled=world.is_first):
        trainer = Trainer(config, text, world, life)
        if not config.resume or config.memory_every is None:
            trainer.saves.forget()
        first = trainer.resume(run)
    with (
        Reporter(
            first=first,
            total=config.last_step,
            enabled=world.is_first,
            flops=planned_flops(run),
            device_nbytes=device_nbytes(world.device),
        ) as reporter,
        open(
            run.metrics if world.is_first else os.devnull, "a", encoding="utf-8", buffering=1
        ) as metrics,  # each step is written at its end
        tracker_of(config, first=first, enabled=world.is_first) as tracker,
        stopping() as trainer.stopping,
        recording(config, run, trainer.model),
        on_progress(reporter.show_operation),
    ):

        def tell(step: StartedStep) -> None:
            record = trainer.record(step)
            metrics.write(record.to_json() + "\n")
            figures = record.known()
            tracker.write(int(figures.pop("step")), figures)
            reporter.show(record)

        last: StartedStep | None = None  # the device may still compute its figures
        step, why_over = first, None
        while step < config.last_step and not trainer.stopping.is_agreed and why_over is None:
            step += 1
            started = trainer.start(step)
            if last is not None:
                tell(last)
            is_due = trainer.saves.is_due(step) or step == config.last_step
            last = started
            if is_due or trainer.stopping.is_agreed or started.evaluates or started.rows.is_here:
                tell(started)
                last = None
            why_over = trainer.held_out.why_over(config) if step < config.steps else None
            ends = step == config.last_step or trainer.stopping.is_agreed or why_over is not None
            if is_due or ends:
                trainer.save(step, on_disk=ends)
                reporter.saved_step = step
        trainer.saves.wait()
        trainer.saves.forget()
    return Trained(trainer.model, step, why_over)


def build_sharded_model(config: TrainConfig, architecture: Architecture, world: World) -> nn.Module:
    """Build a model and shard it: one unit per block, root for the rest.

    No worker ever has the whole model in memory. The model is built on the meta device. Then all
    workers draw the same values, or read files, for one parameter or unit at a time, and each
    worker keeps its shard.
    """
    model = build_on_meta(config, architecture)
    mesh = init_device_mesh(
        world.device.type,
        (config.replicas, world.size // config.replicas),
        mesh_dim_names=("replicate", "shard"),
    )
    shard_model(model, config, mesh)
    fill(model, config, architecture, world.device)
    return model


def build_on_meta(config: TrainConfig, architecture: Architecture) -> nn.Module:
    """Build a model without memory, with adapters and quantised layers if asked for."""
    with torch.device("meta"):
        model = architecture.build(
            seq=config.seq, checkpoint_activations=config.checkpoint_activations
        )
        if config.quantize is not None:
            quantize_linears(model)
        if config.lora is not None:
            model = add_adapters(model, config.lora)
    return model


def shard_model(model: nn.Module, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Shard ``model`` over a mesh with the dims "replicate" and "shard"."""
    fullshard.shard_blocks(
        model,
        mesh if config.replicas > 1 else mesh["shard"],
        # None selects the default policy: reshard blocks after forward, but not the root.
        reshard_after_forward=None if config.reshard else False,
        mp_policy=policy_of(config),
        layout=layout_of(config),
        wire=wire_of(config),
    )


def layout_of(config: TrainConfig) -> fullshard.PerParameter | fullshard.Ragged:
    """Return the layout of the shards."""
    return fullshard.Ragged() if config.layout is LayoutName.RAGGED else fullshard.PerParameter()


def wire_of(config: TrainConfig) -> fullshard.WirePolicy:
    """Return the encoding of parameters and gradients in communication."""
    return fullshard.WirePolicy.parse(config.wire) if config.wire else fullshard.WirePolicy()


def policy_of(config: TrainConfig) -> fullshard.MixedPrecisionPolicy:
    """Return the dtypes of computation and communication."""
    if config.dtype is Dtype.FP32:
        return fullshard.MixedPrecisionPolicy()
    return fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def fill(
    model: nn.Module, config: TrainConfig, architecture: Architecture, device: torch.device
) -> None:
    """Give a model on the meta device its first values: from ``config.seed`` or ``config.init``.

    With adapters, a resumed run reads the frozen weights from ``config.init`` again, because
    checkpoints have no scales of quantised weights.
    """
    drawn_on = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(drawn_on), torch.no_grad():
        torch.manual_seed(config.seed)
        if config.init is not None and (config.lora or not config.resume):
            load_weights(model, config.init, convert=conversions(model, device))
        else:
            model.to_empty(device=device)
            architecture.initialise(model)


class StartedStep(NamedTuple):
    """A step that was issued to the device and may still be running."""

    step: int
    lr: float
    seconds: float
    """Seconds of the host. On a GPU, the host waits for the gradients only, so the update of the
    weights counts to the next step."""
    rows: HostRows
    """Per worker: loss, seconds waited, peak and shard bytes, gradient norm, asked to stop, error
    of the wire in gathers and in reductions."""
    skipped: int
    """Steps skipped so far, this one included."""
    repeated: int
    """Number of times that a step was repeated so far."""
    evaluates: bool
    """True if an evaluation follows the step."""


class Trainer:
    """A model with its optimizer and its text, and the operations of training."""

    def __init__(
        self,
        config: TrainConfig,
        text: TokenizedText,
        world: World,
        life: fullshard.Life | None = None,
    ) -> None:
        self.config, self.world = config, world
        self.life = fullshard.Life(world.rank, world.size) if life is None else life
        architecture = choose_architecture(config)
        self.model: Any = build_sharded_model(config, architecture, world)  # an FSDPModule, too
        self.optimizer = build_optimizer(self.model, config)
        self.guard = StepGuard(
            self.model, self.optimizer, max_norm=config.clip, max_skipped=config.max_skipped
        )
        self.microbatches = fullshard.Microbatches(
            self.model, parts=config.accumulate, sums=True, reduces_each=False
        )
        self.saves = Saves(config, marks_best=world.is_first)
        self.held_out = HeldOut()
        self.bits: dict[int, float] = {}  # of the last evaluation, by its step
        self.bad_records = text.bad.count
        self.feed = Feed.of(config, text, world.size)
        self.evaluation = Evaluation(self.model, config, text, world)
        self.origin = describe(
            config, architecture.description(), text_key=text.key, num_workers=world.size
        )
        if isinstance(self.feed.rows, Packed) and not self.feed.rows.alone:
            self._check_kept_apart()
        self.stopping = Stopping()

    def start(self, step: int) -> StartedStep:
        """Issue one optimizer step; on a GPU, the host waits for the gradients only."""
        config = self.config
        started_s, waited_before_s = time.perf_counter(), self.model.waited_s()
        torch.manual_seed(_dropout_seed(config.seed, step, self.world.rank))
        lr = set_learning_rate(self.optimizer, step, config)
        evaluates = step % config.eval_every == 0 or step == config.steps
        if evaluates:
            self.model.set_wire_check(True)
        loss = self._forward_backward(step)
        try:
            self.guard.step(loss)
        except NonFiniteError as error:
            self.saves.wait()
            raise ConfigError(f"step {step}: {error}; --lr is {config.lr}") from error
        self.life.reached(step, self.extra(step))
        self.optimizer.zero_grad()
        rows = self.world.rows_later(
            loss,
            self.model.waited_s() - waited_before_s,
            peak_memory_nbytes(self.world.device),
            shard_nbytes(self.model),
            self.guard.norm,
            float(self.stopping.is_asked),
            *(end_wire_check(self.model) if evaluates else (math.nan, math.nan)),
        )
        counts = self.guard.skipped, self.microbatches.repeated
        return StartedStep(step, lr, time.perf_counter() - started_s, rows, *counts, evaluates)

    def record(self, started: StartedStep) -> StepRecord:
        """Wait for a step and return its record, with an evaluation if one is due."""
        config, step = self.config, started.step
        figures = started.rows.read()
        losses, waits_s, peaks, shards, grad_norms, asked, *lost = figures.unbind(dim=1)
        gathered, reduced = (
            one.max().item() if bool(one.isfinite().all()) else None for one in lost
        )
        self.stopping.is_agreed |= bool(asked.any())
        num_tokens = config.batch * config.seq * config.accumulate * self.world.size
        evaluated: dict[str, float] = {}
        if started.evaluates:
            bits, nats = self.evaluation.run()
            evaluated = {"eval_bits_per_byte": bits, "eval_loss": nats}
            self.bits, self.held_out = {step: bits}, self.held_out.after(step, bits)
        return StepRecord(
            step=step,
            loss=losses[losses.isfinite()].mean().item(),
            tokens_per_s=num_tokens / started.seconds,
            lr=started.lr,
            grad_norm=grad_norms[self.world.rank].item(),
            seconds=started.seconds,
            peak_memory_nbytes=int(peaks.max()),
            shard_nbytes=int(shards.max()),
            waiting=waits_s.mean().item() / started.seconds,
            **evaluated,
            skipped=started.skipped or None,
            repeated=started.repeated or None,
            bad_records=self.bad_records or None,
            gather_error=gathered,
            reduce_error=reduced,
        )

    def _forward_backward(self, step: int) -> Tensor:
        """Accumulate the gradients of a step and return this worker's loss in fp64.

        The mean of these losses over all workers is the mean cross entropy of all learned tokens of
        the step, plus the mean over rows of the loss that the model adds. Rows may have different
        numbers of learned tokens.
        """
        loss = partial(
            training_loss,
            self.model,
            world=self.world,
            of_label=self.world.size / self.feed.num_learned(step),
            of_row=self.world.size / len(self.feed.order.rows_of_step(step)),
        )
        read = self.feed.read(step=step, rank=self.world.rank)
        return self.microbatches.backward(loss, read).double()

    @torch.no_grad()
    def _check_kept_apart(self) -> None:
        """Refuse models in which a sample of a row depends on the one before.

        Raises:
            ConfigError: the model is such a model; raised on all workers.
        """
        half = min(self.config.seq // 2, 8)
        if not half:  # a row of one token holds one sample
            return
        positions = torch.arange(half).repeat(2)[None]
        self.model.eval()
        first, second = (
            next_token_logits(
                self.model,
                self.world.put(torch.tensor([[token] * half + [*range(half)]])),
                self.world.put(positions),
            )[:, half:]
            for token in (0, 1)
        )
        self.model.train()
        rounding = _ROUNDING[self.config.dtype]
        if (first - second).abs().max() > rounding * first.abs().max():
            raise ConfigError(
                f"--model {self.config.model} does not separate the chats of a row: it ignores "
                "position_ids that begin anew. Give --no-pack, which puts each chat in a row of "
                "its own"
            )

    def save(self, step: int, *, on_disk: bool = True) -> None:
        """Start to write the checkpoint of ``step``, after the end of the previous save.

        If ``on_disk`` is False, the checkpoint may be in memory alone.
        """
        self.saves.save(
            self.model,
            self.optimizer,
            self.extra(step),
            step=step,
            on_disk=on_disk,
            bits_per_byte=self.bits.get(step),
        )

    def extra(self, step: int) -> dict[str, Any]:
        """Return the facts of a checkpoint of ``step``."""
        return asdict(replace(self.origin, step=step, held_out=asdict(self.held_out)))

    def resume(self, run: RunDir) -> int:
        """Load the newest state, drop later metrics, and return its step; 0 if there is none."""
        resumes = self.config.resume
        loaded = self.saves.load(self.model, self.optimizer, self.life, resumes=resumes)
        if loaded is None and resumes:
            raise ConfigError(f"{run.checkpoints}: no intact checkpoint; leave --resume out")
        if loaded is not None:
            origin = origin_of(loaded)
            check_continues(self.config, self.origin, Path(str(loaded.path)), origin)
            self.held_out = HeldOut(**(origin.held_out or {}))
        set_options(self.optimizer, self.config)
        step = 0 if loaded is None else loaded.step
        if self.world.is_first and (resumes or self.life.number):
            drop_after(run.metrics, step)
            self.saves.resume_best(step)
        return step


def _dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the dropout seed of a step: different per worker, unchanged by resuming."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
