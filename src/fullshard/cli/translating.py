"""``fullshard translate``: the program for a configuration of DeepSpeed or Accelerate."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.errors import ConfigError
from fullshard.train.extras import imported

_AUTO = "auto"  # a value that the Trainer of transformers fills in


def translate_command(
    config: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="JSON of DeepSpeed, or JSON or YAML of Accelerate."),
    ],
) -> None:
    """Translate a configuration of DeepSpeed or Accelerate into a program, with notes."""
    print(translated(read(config), config.name), end="")


def read(path: Path) -> dict[str, Any]:
    """Return the configuration in a file; raise ``ConfigError`` if there is none."""
    parse = json.loads
    if path.suffix in (".yaml", ".yml"):
        parse = imported("yaml", str(path), extra="hf", package="PyYAML").safe_load
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except Exception as error:  # each parser has its own
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds a {type(found).__name__}, expected keys and values")
    return found


def translated(config: Mapping[str, Any], name: str) -> str:
    """Return the source of a program for ``config``, with notes on other settings as comments.

    Args:
        config: of DeepSpeed, or of Accelerate.
        name: of its file, for the first line.

    Raises:
        ConfigError: a value is invalid, or two values contradict each other.
    """
    program = Program()
    if "fsdp_config" in config or "deepspeed_config" in config or "distributed_type" in config:
        _take_accelerate(program, config)
    else:
        _take_deepspeed(program, config)
    return program.text(name)


_WORLD_SIZE = 'int(os.environ["WORLD_SIZE"])'
"""The number of ranks, as code that needs no process group."""


@dataclass
class Program:
    """A training program on fullshard, as far as a configuration decides it."""

    mesh: tuple[str, str] | None = None
    """Number of copies and number of shards, as code."""
    checkpoints: str | None = None
    shard: dict[str, str] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    optimizer: str = "torch.optim.AdamW"
    optimizer_options: dict[str, str] = field(default_factory=dict)
    offload_key: str = ""
    """The key that asks for state on the host."""
    scaler: dict[str, str] | None = None
    accumulate: int = 1
    clip: float | None = None
    notes: dict[str, str] = field(default_factory=dict)
    """Advice by key of the configuration."""

    def text(self, name: str) -> str:
        """Return the source, with the notes as comments at its end."""
        lines = [f'"""Made from {name} by fullshard translate."""', ""]
        lines += ["import os", ""] if "os." in "".join(self.mesh or ()) else []
        lines += ["import torch"]
        if self.mesh is not None:
            lines += ["from torch.distributed.device_mesh import init_device_mesh"]
        lines += ["", "import fullshard", "", "", "def train(model, batches, loss_of):"]
        lines += ['    """Train on the batches of this rank; `loss_of(model, batch)` is a mean."""']
        body = "\n".join((*self._sharding(), *self._optimizer(), *self._loop()))
        lines += [textwrap.indent(body, "    "), *self._notes()]
        return "\n".join(lines) + "\n"

    def _sharding(self) -> Iterator[str]:
        if self.mesh is not None:
            copies, shards = self.mesh
            yield 'device = torch.accelerator.current_accelerator(True) or torch.device("cpu")'
            yield f"shards = {shards}"
            yield f"sizes = {copies}, shards"
            yield 'names = "replicate", "shard"'
            yield "mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)"
        if self.checkpoints is not None:
            yield self.checkpoints
        given = ["model", *(["mesh"] if self.mesh else []), *_keywords(self.shard)]
        yield _call("fullshard.shard_blocks", given)
        yield from self.after

    def _optimizer(self) -> Iterator[str]:
        if self.optimizer.startswith("torch."):
            of, given = "ShardedOptimizer", ["model.parameters()", self.optimizer]
        else:
            of, given = self.optimizer, ["model"]
            if self.optimizer_options.pop("host_fraction", None) is not None:
                self.notes[self.offload_key] = "Muon keeps its state on the device"
        given += _keywords(self.optimizer_options)
        yield _call(f"optimizer = fullshard.optim.{of}", given)
        if self.scaler is not None:
            yield _call("scaler = fullshard.optim.ShardedGradScaler", _keywords(self.scaler))

    def _loop(self) -> Iterator[str]:
        yield "for number, batch in enumerate(batches, start=1):"
        loss = "loss_of(model, batch)"
        loss = f"({loss} / {self.accumulate})" if self.accumulate > 1 else loss
        yield f"    {loss if self.scaler is None else f'scaler.scale({loss})'}.backward()"
        if self.accumulate > 1:
            yield f"    if number % {self.accumulate}:"
            yield "        continue"
        if self.clip is not None:
            if self.scaler is not None:
                yield "    scaler.unscale_(optimizer)"
            yield f"    fullshard.optim.clip_grad_norm_(model.parameters(), {self.clip})"
        if self.scaler is not None:
            yield "    scaler.step(optimizer)"
            yield "    scaler.update()"
        else:
            yield "    optimizer.step()"
        yield "    optimizer.zero_grad()"

    def _notes(self) -> Iterator[str]:
        if self.notes:
            yield "\n"
            yield "# Notes on other settings:"
        for key, text in self.notes.items():
            yield from textwrap.wrap(
                f"{key}: {text}", 98, initial_indent="# - ", subsequent_indent="#   "
            )


def _keywords(options: Mapping[str, str]) -> list[str]:
    return [f"{name}={code}" for name, code in options.items()]


def _call(function: str, arguments: list[str]) -> str:
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= 94:
        return line
    return "\n".join((f"{function}(", *(f"    {one}," for one in arguments), ")"))


_SELF = "nothing to do: fullshard always does this"
_PLAN = "fullshard.plan(model, budget_nbytes=...) chooses options that fit"
_TRACE = "fullshard.trace(model, folder) records this"
_LOG = "log in the loop; fullshard train has --log"

_NOTES = {
    "train_batch_size": "batches of a rank decide it",
    "train_micro_batch_size_per_gpu": "batches of a rank decide it",
    "steps_per_print": _LOG,
    "wall_clock_breakdown": _TRACE,
    "comms_logger": _TRACE,
    "flops_profiler": "fullshard.plan(model, batch=...) counts FLOPs",
    "tensorboard": _LOG,
    "wandb": _LOG,
    "csv_monitor": _LOG,
    "autotuning": _PLAN,
    "elasticity": "fullshard.resilient goes on with the ranks that are left",
    "tensor_parallel": "torch.distributed.tensor.parallel, before shard_blocks (docs/meshes.md)",
    "scheduler": "use a class of torch.optim.lr_scheduler with the optimizer",
    "communication_data_type": "MixedPrecisionPolicy(reduce_dtype=...)",
    "data_types": "gradients accumulate in MixedPrecisionPolicy(reduce_dtype=...)",
    "prescale_gradients": "model.set_gradient_divide_factor",
    "gradient_predivide_factor": "model.set_gradient_divide_factor",
    "amp": "torch.autocast, or bf16",
    "checkpoint": "fullshard.checkpoint.Checkpointer (docs/checkpoints.md)",
    "zero_allow_untested_optimizer": "ShardedOptimizer tries each class once by itself",
    "zero_force_ds_cpu_optimizer": "with offload_param the optimizer steps on the CPU, with "
    "offload_optimizer on the GPU",
    "zero_optimization.overlap_comm": _SELF,
    "zero_optimization.contiguous_gradients": _SELF,
    "zero_optimization.reduce_scatter": _SELF,
    "zero_optimization.allgather_partitions": _SELF,
    "zero_optimization.allgather_bucket_size": "each unit is one gather",
    "zero_optimization.round_robin_gradients": _SELF,
    "zero_optimization.sub_group_size": "each unit is stepped by itself",
    "zero_optimization.stage3_max_live_parameters": "model.set_prefetch_budget bounds them",
    "zero_optimization.stage3_max_reuse_distance": "reshard_after_forward decides it by unit",
    "zero_optimization.stage3_param_persistence_threshold": "small parameters are sharded, too; "
    "they are gathered with their unit",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "fullshard.checkpoint."
    "save_weights(model, folder, dtype=...)",
    "zero_optimization.ignore_unused_parameters": _SELF,
    "zero_optimization.memory_efficient_linear": "use torch.nn.Linear",
    "zero_optimization.load_from_fp32_weights": "save_weights and load_weights",
    "zero_optimization.elastic_checkpoint": _SELF,
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights may be stored in NF4 "
    "by torchao (docs/finetuning.md)",
    "activation_checkpointing.partition_activations": "activations are not divided here",
    "activation_checkpointing.contiguous_memory_optimization": "there is no such option here",
    "activation_checkpointing.number_checkpoints": "checkpoint_blocks(model, policy=...)",
    "activation_checkpointing.synchronize_checkpoint_boundary": "there is no such option here",
    "activation_checkpointing.profile": _TRACE,
    "fsdp_config.fsdp_version": _SELF,
    "fsdp_config.fsdp_auto_wrap_policy": "shard_blocks finds the blocks; or give it policy=",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "shard_blocks finds the blocks; or give it "
    "policy=fullshard.wrap.ModuleWrapPolicy({...})",
    "fsdp_config.fsdp_min_num_params": "shard_blocks(policy=functools.partial(fullshard.wrap."
    "size_based_auto_wrap_policy, ...))",
    "fsdp_config.fsdp_backward_prefetch": _SELF,
    "fsdp_config.fsdp_forward_prefetch": _SELF,
    "fsdp_config.fsdp_use_orig_params": _SELF,
    "fsdp_config.fsdp_sync_module_states": "a model on the meta device, then load_weights",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "a model on the meta device, then load_weights",
    "fsdp_config.fsdp_state_dict_type": "fullshard.checkpoint.save, save_weights or "
    "full_state_dict",
    "dynamo_config": "torch.compile each block before shard_blocks",
    "num_processes": "torchrun --nproc-per-node",
    "num_machines": "torchrun --nnodes",
    "machine_rank": "torchrun --node-rank",
    "main_process_ip": "torchrun --rdzv-endpoint",
    "main_process_port": "torchrun --rdzv-endpoint",
    "rdzv_backend": "torchrun --rdzv-backend",
    "gpu_ids": "CUDA_VISIBLE_DEVICES",
    "use_cpu": "init_process_group('gloo')",
}
"""Keys that add no line to the program, each with advice."""

_SILENT = set(
    "compute_environment debug downcast_bf16 enable_cpu_affinity main_training_function "
    "same_network tpu_env tpu_use_cluster tpu_use_sudo distributed_type dump_state "
    "deepspeed_config.deepspeed_moe_layer_cls_names deepspeed_config.deepspeed_multinode_launcher "
    "deepspeed_config.zero3_save_16bit_model".split()
)
"""Keys that say nothing about the training."""

_CLASSES = {
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "rmsprop": "torch.optim.RMSprop",
    "muon": "Muon",
}
_OPTIONS = {"lr", "betas", "eps", "weight_decay", "momentum"}

Rule = Callable[[Program, str, Any], None]


def _take_deepspeed(program: Program, config: Mapping[str, Any]) -> None:
    if _is_on(config.get("fp16")) and _is_on(config.get("bf16")):
        raise ConfigError("fp16 and bf16 are enabled: choose one")
    sections = "zero_optimization", "activation_checkpointing"
    _apply(program, _flat(config, sections), _DEEPSPEED)


def _take_accelerate(program: Program, config: Mapping[str, Any]) -> None:
    flat = _flat(config, ("fsdp_config", "deepspeed_config"))
    path = flat.pop("deepspeed_config.deepspeed_config_file", None)
    if path is not None:
        _take_deepspeed(program, read(Path(path)))
    _apply(program, flat, _ACCELERATE)


def _flat(config: Mapping[str, Any], sections: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings by key, those of ``sections`` by "section.key"."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key in sections:
            if not isinstance(value, Mapping | None):
                raise ConfigError(f"{key} is {value!r}, expected keys and values")
            flat |= {f"{key}.{name}": one for name, one in (value or {}).items()}
        else:
            flat[key] = value
    return flat


def _apply(program: Program, flat: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    for key, value in flat.items():
        if key in _SILENT or value in ({}, None, ""):
            continue
        if key in rules:
            is_section = isinstance(value, Mapping)
            if _AUTO == (value.get("enabled", value.get("device")) if is_section else value):
                program.notes[key] = "the Trainer chose it; choose it here"
            else:
                rules[key](program, key, value)
        elif key not in _NOTES:
            program.notes[key] = f"{value!r} is not known here"
        elif value not in (False, _AUTO):
            program.notes[key] = _NOTES[key]


def _is_on(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled", False) is True


def _number(key: str, value: Any, kind: type[int] | type[float]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"{key} is {value!r}, expected a number of at least 0")
    return kind(value)


def _bf16(program: Program, key: str, value: Any) -> None:
    if _is_on(value):
        _precision(program, "torch.bfloat16")


def _precision(program: Program, dtype: str) -> None:
    program.shard["mp_policy"] = f"fullshard.MixedPrecisionPolicy({dtype}, torch.float32)"


def _fp16(program: Program, key: str, value: Any) -> None:
    if not _is_on(value):
        return
    _precision(program, "torch.float16")
    program.scaler = {}
    if value.get("loss_scale", 0):
        program.scaler["init_scale"] = repr(float(value["loss_scale"]))
        program.notes["fp16.loss_scale"] = (
            "ShardedGradScaler begins with this scale, and adjusts it"
        )
    elif "initial_scale_power" in value:
        power = _number("fp16.initial_scale_power", value["initial_scale_power"], int)
        program.scaler["init_scale"] = f"2.0**{power}"
    if "loss_scale_window" in value:
        window = _number("fp16.loss_scale_window", value["loss_scale_window"], int)
        program.scaler["growth_interval"] = str(window)
    for name in {"hysteresis", "min_loss_scale", "auto_cast"} & value.keys():
        program.notes[f"fp16.{name}"] = "ShardedGradScaler has no such option"


def _clip(program: Program, key: str, value: Any) -> None:
    program.clip = _number(key, value, float) or None


def _accumulate(program: Program, key: str, value: Any) -> None:
    program.accumulate = max(_number(key, value, int), 1)


def _optimizer(program: Program, key: str, value: Any) -> None:
    given = dict(value.get("params") or {})
    name = str(value.get("type", "AdamW")).lower()
    if name in ("adam", "adamw"):
        is_decoupled = name == "adamw" or given.pop("adam_w_mode", True)
        program.optimizer = f"torch.optim.{'AdamW' if is_decoupled else 'Adam'}"
    elif name in _CLASSES:
        program.optimizer = _CLASSES[name]
    else:
        program.notes[f"{key}.type"] = (
            f"{value['type']} has no counterpart, so the program has torch.optim.AdamW; "
            "ShardedOptimizer accepts classes that update each element by itself, OwnedOptimizer "
            "classes that need full matrices"
        )
    for option, own in given.items():
        full = f"{key}.params.{option}"
        if own == _AUTO:
            program.notes[full] = "the Trainer chose it; choose it here"
        elif option in (_OPTIONS if name != "muon" else _OPTIONS - {"betas", "eps"}):
            program.optimizer_options[option] = repr(tuple(own) if option == "betas" else own)
        elif option not in ("torch_adam", "adam_w_mode"):
            program.notes[full] = f"{own!r} is not known here"


def _stage(program: Program, key: str, value: Any) -> None:
    if value not in (0, 1, 2, 3):
        raise ConfigError(f"{key} is {value!r}, expected 0, 1, 2 or 3")
    if value == 0:
        program.mesh = (_WORLD_SIZE, "1")
    if value < 3:
        program.shard["reshard_after_forward"] = "False"


def _offloads(program: Program, key: str, value: Any) -> bool:
    device = value.get("device") if isinstance(value, Mapping) else value
    if device == "nvme":
        program.notes[key] = "fullshard offloads to host memory, not to NVMe"
    return device not in (False, None, "none", _AUTO, "nvme")


def _offload_params(program: Program, key: str, value: Any) -> None:
    if _offloads(program, key, value):
        program.shard["offload_policy"] = "fullshard.CPUOffloadPolicy()"
        program.optimizer_options.pop("host_fraction", None)  # all of it is on the host then


def _offload_state(program: Program, key: str, value: Any) -> None:
    if _offloads(program, key, value) and "offload_policy" not in program.shard:
        ratio = value.get("ratio", 1.0) if isinstance(value, Mapping) else 1.0
        program.offload_key = key
        program.optimizer_options["host_fraction"] = repr(_number(f"{key}.ratio", ratio, float))


def _budget(method: str, program: Program, key: str, value: Any) -> None:
    nbytes = 2 * _number(key, value, int)
    program.after.append(f"model.{method}({nbytes:_})  # bytes, for {value:,.0f} elements in bf16")


def _hpz(program: Program, key: str, value: Any) -> None:
    if _number(key, value, int) > 1:
        program.shard["reshard_after_forward"] = str(value)


def _mics(program: Program, key: str, value: Any) -> None:
    if isinstance(value, int) and value > 0:
        program.mesh = (f"{_WORLD_SIZE} // shards", str(value))


def _wire(part: str, code: str, program: Program, key: str, value: Any) -> None:
    if value is True:
        before = program.shard.get("wire", "fullshard.WirePolicy()").removesuffix(")")
        comma = "" if before.endswith("(") else ", "
        program.shard["wire"] = f"{before}{comma}{part}={code!r})"


def _activations(program: Program, key: str, value: Any) -> None:
    if value is True:
        offload = ", offload=True" if key.endswith("cpu_checkpointing") else ""
        program.checkpoints = f"fullshard.checkpoint_blocks(model{offload})"


def _mixed_precision(program: Program, key: str, value: Any) -> None:
    if value == "fp16":
        _fp16(program, key, {"enabled": True})
    elif value == "bf16":
        _precision(program, "torch.bfloat16")
    elif value != "no":
        program.notes[key] = f"{value!r}: see docs/recipes/float8.md"


def _strategy(program: Program, key: str, value: Any) -> None:
    """Take a strategy of FSDP1, by name or number, or ``reshard_after_forward`` of FSDP2."""
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    is_number = not isinstance(value, bool) and str(value).isdigit()
    if is_number and 1 <= int(value) <= len(names):
        value = names[int(value) - 1]
    value = str(value).strip("_").upper()
    if value not in (*names, "TRUE", "FALSE"):
        raise ConfigError(f"{key} is {value!r}, expected one of {', '.join(names)}, true, false")
    if value in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "FALSE"):
        program.shard["reshard_after_forward"] = "False"
    if value == "NO_SHARD":
        _stage(program, key, 0)
    if value.startswith("HYBRID"):
        local = 'int(os.environ["LOCAL_WORLD_SIZE"])'
        program.mesh = (f"{_WORLD_SIZE} // shards", local)


_ZERO = "zero_optimization"
_DEEPSPEED: dict[str, Rule] = {
    "bf16": _bf16,
    "bfloat16": _bf16,
    "fp16": _fp16,
    "gradient_clipping": _clip,
    "gradient_accumulation_steps": _accumulate,
    "optimizer": _optimizer,
    f"{_ZERO}.stage": _stage,
    f"{_ZERO}.offload_param": _offload_params,
    f"{_ZERO}.offload_optimizer": _offload_state,
    f"{_ZERO}.stage3_prefetch_bucket_size": partial(_budget, "set_prefetch_budget"),
    f"{_ZERO}.reduce_bucket_size": partial(_budget, "set_reduction_budget"),
    f"{_ZERO}.zero_hpz_partition_size": _hpz,
    f"{_ZERO}.mics_shard_size": _mics,
    f"{_ZERO}.zero_quantized_weights": partial(_wire, "gather", "int8"),
    f"{_ZERO}.zero_quantized_gradients": partial(_wire, "reduce", "int4"),
    "activation_checkpointing.cpu_checkpointing": _activations,
}
_ACCELERATE: dict[str, Rule] = {
    "mixed_precision": _mixed_precision,
    "gradient_accumulation_steps": _accumulate,
    "gradient_clipping": _clip,
    "fsdp_config.fsdp_sharding_strategy": _strategy,
    "fsdp_config.fsdp_reshard_after_forward": _strategy,
    "fsdp_config.fsdp_offload_params": lambda program, key, value: _offload_params(
        program, key, "cpu" if value is True else None
    ),
    "fsdp_config.fsdp_activation_checkpointing": _activations,
    "deepspeed_config.zero_stage": _stage,
    "deepspeed_config.gradient_accumulation_steps": _accumulate,
    "deepspeed_config.gradient_clipping": _clip,
    "deepspeed_config.offload_param_device": _offload_params,
    "deepspeed_config.offload_optimizer_device": _offload_state,
    "deepspeed_config.zero3_init_flag": lambda program, key, value: program.notes.update(
        {key: "a model on the meta device, then load_weights"}
    ),
}
