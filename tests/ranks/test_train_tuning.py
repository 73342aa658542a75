"""Fine-tuning on chats (``--init``, ``--lora``, ``--quantize``, ``--export``)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import checkpoint, fully_shard
from fullshard.errors import ConfigError
from fullshard.optim import clip_grad_norm_
from fullshard.tensors import local_part
from fullshard.train import loop
from fullshard.train.architecture import choose_architecture
from fullshard.train.config import Dtype, LayoutName, Quantize, TrainConfig
from fullshard.train.data import load_text
from fullshard.train.job.export import _write_others
from fullshard.train.job.finished import FinishedRun
from fullshard.train.job.prepare import prepare
from fullshard.train.loop import build_sharded_model
from fullshard.train.optimizer import build_optimizer, learning_rate
from fullshard.train.run.folder import RunDir
from fullshard.train.world import World
from tests.kit.examples import EXAMPLES, TIMEOUT_S
from tests.kit.train_chats import write_chats
from tests.kit.train_chats import write_tokenizer as write_chat_tokenizer
from tests.kit.train_init import CONFIGS
from tests.kit.train_tuning import alone, config_of, expected_losses, text_of, trainer_of, tuned
from tests.ranks.pool import RankError, RankPool
from tests.ranks.train_shell import Shell

pytest.importorskip("transformers", reason="the extra hf is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # from peft and transformers
    pytest.mark.usefixtures("own_cache"),
]

WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": 4},
    "qlora": {"lora": 4, "quantize": Quantize.NF4},
}


def needs(way: str) -> None:
    if "lora" in WAYS[way]:
        pytest.importorskip("peft", reason="the extra lora is not installed")
    if "quantize" in WAYS[way]:
        pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")


def logits_of(model: Any) -> Tensor:
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        # In train mode: after eval(), bitsandbytes uses 16-bit kernels for weights of any dtype.
        found: Tensor = model.train()(input_ids=tokens).logits
    return found


def exported(config: TrainConfig, folder: Path) -> Any:
    """Load an exported folder as its users do."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder).chat_template is not None
    if config.lora is None or config.merge:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from peft import PeftModel

    base: Any = alone(TrainConfig(**{**vars_of(config), "lora": None, "quantize": None}))
    if config.quantize is not None:
        base = alone_quantized(config)
    return PeftModel.from_pretrained(base, str(folder))


def vars_of(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def alone_quantized(config: TrainConfig) -> Any:
    return alone(config).unload()  # type: ignore[operator]


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("way", list(WAYS))
def test_losses_and_what_is_exported_are_those_of_one_process(
    pool: RankPool, tmp_path: Path, kind: str, way: str
) -> None:
    needs(way)
    config = config_of(tmp_path, kind, **WAYS[way])
    model = alone(config)
    expected = expected_losses(config, model, 2)
    found, bits = pool.run(2, tuned, config, 3, str(tmp_path / "exported"))[0]
    assert found == pytest.approx(expected, abs=1e-5)
    assert 0 < bits < 20 and found[-1] < found[0]
    torch.testing.assert_close(
        logits_of(exported(config, tmp_path / "exported")), logits_of(model), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("way", ["lora", "qlora"])
@pytest.mark.parametrize("layout", list(LayoutName))
def test_a_tuning_goes_on_exactly_on_other_ranks_and_layouts(
    pool: RankPool, tmp_path: Path, way: str, layout: LayoutName
) -> None:
    needs(way)
    options = {**WAYS[way], "steps": 4, "dtype": Dtype.BF16}
    config = config_of(tmp_path, "qwen3", **options, layout=layout, checkpoint_activations=True)
    whole, bits = pool.run(2, tuned, config, 4, None)[0]
    half = replace(config, out=str(tmp_path / "half"))
    first, _ = pool.run(2, tuned, half, 2, None)[0]
    rest, at_end = pool.run(2, tuned, replace(half, resume=True), 4, None)[0]
    assert (first + rest, at_end) == (whole, bits)
    other = replace(half, resume=True, batch=1, layout=LayoutName.PER_PARAMETER)
    (tmp_path / "half" / "checkpoints" / "step-000004").rename(tmp_path / "aside")
    rest, at_end = pool.run(4, tuned, other, 4, None)[0]
    assert first + rest == pytest.approx(whole, abs=1e-2) and at_end == pytest.approx(bits, abs=0.1)


@pytest.mark.parametrize("way", ["lora", "qlora"])
def test_checkpoints_have_what_is_trained_alone(pool: RankPool, tmp_path: Path, way: str) -> None:
    """Checkpoints have only trained tensors, under peft's names, and export the same adapters."""
    needs(way)
    config = config_of(tmp_path, "llama", **WAYS[way], steps=2)
    model = alone(config)
    trained = {f"model/{name}" for name, own in model.named_parameters() if own.requires_grad}
    pool.run(2, tuned, config, 2, str(tmp_path / "at_the_end"))
    run = RunDir(Path(config.out))
    info = checkpoint.inspect(run.checkpoint(2))
    of_model = {name for name in info.tensors if name.startswith("model/")}
    assert of_model == trained
    config.save(run.config)
    finished = FinishedRun.at(run.path)
    finished.export(run.checkpoint(2), tmp_path / "later", None)
    both = [exported(config, tmp_path / name) for name in ("at_the_end", "later")]
    assert torch.equal(logits_of(both[0]), logits_of(both[1]))
    (weights,) = Path(str(config.init)).glob("*1-of*.safetensors")
    changed = bytearray(weights.read_bytes())
    changed[-15_000:] = bytes(15_000)
    weights.write_bytes(changed)
    with pytest.raises(ConfigError, match="has adapters of other weights than --init"):
        finished.export(run.checkpoint(2), tmp_path / "wrong", None)


@pytest.mark.parametrize("way", ["lora", "qlora"])
def test_adapters_of_other_weights_are_refused(pool: RankPool, tmp_path: Path, way: str) -> None:
    from transformers import AutoModelForCausalLM

    needs(way)
    config = config_of(tmp_path, "llama", **WAYS[way], steps=2)
    pool.run(1, tuned, config, 1, None)
    resumed = replace(config, resume=True)
    folder = Path(str(config.init))
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    model.save_pretrained(folder)  # the same weights in one file
    assert len([*folder.glob("*.safetensors")]) == 1
    pool.run(1, tuned, resumed, 1, None)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    model.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"has adapters of other weights than --init .*llama"):
        prepare(resumed, num_workers=1)
    with pytest.raises(RankError, match="has adapters of other weights"):
        pool.run(1, tuned, resumed, 1, None)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_merged_it_is_one_model(pool: RankPool, tmp_path: Path, kind: str) -> None:
    needs("lora")
    config = config_of(tmp_path, kind, **WAYS["lora"], merge=True, export=str(tmp_path / "x"))
    model = alone(config)
    expected_losses(config, model, 2)
    pool.run(2, tuned, config, 3, str(tmp_path / "x"))
    found = logits_of(exported(config, tmp_path / "x"))
    torch.testing.assert_close(found, logits_of(model), rtol=0, atol=1e-4)


SMALL_OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 300, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


@pytest.mark.parametrize("kind", list(SMALL_OTHERS))
def test_models_without_positions_read_each_chat_in_a_row_of_its_own(
    pool: RankPool, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    plain = AutoConfig.for_model(kind, tie_word_embeddings=True, **SMALL_OTHERS[kind])
    AutoModelForCausalLM.from_config(plain).save_pretrained(tmp_path / kind)
    write_chat_tokenizer(tmp_path / kind)
    write_chats(tmp_path / "chats.jsonl", 60)
    config = config_of(tmp_path, kind)
    prepare(config, num_workers=2).close()
    said = capfd.readouterr().err
    assert "note: each chat has a row of its own (--no-pack, or a model without position" in said
    rows = text_of(config).train.rows(config.seq)
    batch = rows.read(np.arange(len(rows)))
    assert batch.positions is None and len(rows) > 50
    expected = expected_losses(config, alone(config), 2)
    assert pool.run(2, tuned, config, 3, None)[0][0] == pytest.approx(expected, abs=1e-5)


def test_chats_have_rows_of_their_own_if_asked(tmp_path: Path) -> None:
    packed, apart = (
        text_of(config_of(tmp_path, "llama", pack=pack)).train.rows(64) for pack in (True, False)
    )
    assert len(apart) > 50 > len(packed) + 20  # most rows have two chats
    batch = apart.read(np.arange(len(apart)))
    assert batch.positions is None and (batch.labels != -100).any(axis=1).all()
    learned = [rows.num_learned(np.arange(len(rows))) for rows in (packed, apart)]
    assert learned[0] == learned[1]


def balanced(config: TrainConfig, path: Path) -> list[tuple[float, float]]:
    """Return pairs of losses, of a step and of transformers on the same rows and weights."""
    from transformers import AutoModelForCausalLM

    trainer = trainer_of(config)
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = build_optimizer(theirs, config)
    feed, found = trainer.feed, []
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        total, parts = 0.0, config.accumulate * dist.get_world_size()
        for microbatch in range(config.accumulate):
            for rank in range(dist.get_world_size()):
                rows = feed.order.rows(step=step, microbatch=microbatch, rank=rank)
                tokens, labels = (one[..., :] for one in feed.rows.read(rows).tensors()[:2])
                # In transformers, a label belongs to the token before; the last column has none.
                shifted = torch.cat([torch.full_like(labels[:, :1], -100), labels], 1)
                longer = torch.cat([tokens, tokens[:, :1]], 1)
                plain = theirs(longer, labels=shifted, output_router_logits=False).loss
                with_both = theirs(tokens, labels=tokens)
                without = theirs(tokens, labels=tokens, output_router_logits=False)
                loss = (plain + with_both.loss - without.loss) / parts
                loss.backward()
                total += loss.item()
        clip_grad_norm_(theirs.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append((trainer.record(trainer.start(step)).loss, total))
    return found


def test_experts_are_balanced_as_their_configuration_says(pool: RankPool, tmp_path: Path) -> None:
    config = config_of(tmp_path, "mixtral")
    path = tmp_path / "mixtral" / "config.json"
    plain = json.loads(path.read_text())
    (tmp_path / "text.txt").write_text("the answer of a question is that for it to and in " * 200)
    config = replace(config, data=str(tmp_path / "text.txt"))
    losses = []
    for added in ({}, {"output_router_logits": True, "router_aux_loss_coef": 0.5}):
        path.write_text(json.dumps(plain | added))
        found = pool.run(2, balanced, config, path.parent)[0]
        assert all(ours == pytest.approx(theirs, abs=1e-5) for ours, theirs in found)
        losses.append(found[0][0])
    assert losses[1] > losses[0] + 0.5


def test_what_belongs_to_the_model_is_exported_with_it(pool: RankPool, tmp_path: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    config = config_of(tmp_path, "llama")
    folder, out = tmp_path / "llama", tmp_path / "exported"
    sampling = GenerationConfig(eos_token_id=[2, 1], temperature=0.3, top_p=0.8, do_sample=True)
    sampling.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 3}')
    (folder / "README.md").write_text("not of the exported model")
    pool.run(2, tuned, config, 1, str(out))
    there = GenerationConfig.from_pretrained(out)
    assert (there.eos_token_id, there.temperature, there.top_p) == ([2, 1], 0.3, 0.8)
    assert AutoConfig.from_pretrained(out).use_cache
    assert (out / "preprocessor_config.json").read_text() == '{"size": 3}'
    assert not (out / "README.md").exists()


class Leaking(nn.Module):
    """A model that takes positions but adds a share of the mean of all earlier tokens of a row."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.embedding = nn.Embedding(300, 4)
        generator = torch.Generator().manual_seed(0)
        self.embedding.weight = nn.Parameter(torch.randn(300, 4, generator=generator))

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        read = self.embedding(tokens)
        before = read.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        mixed = read + (self.share * before).to(read.dtype)
        return mixed @ self.embedding.weight.T


def leaks(config: TrainConfig, share: float) -> None:
    sharded = fully_shard(Leaking(share), mp_policy=loop.policy_of(config))
    with mock.patch.object(loop, "build_sharded_model", lambda *_: sharded):
        trainer_of(config)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_a_model_that_reads_across_samples_is_refused(
    pool: RankPool, tmp_path: Path, dtype: Dtype
) -> None:
    share = 0.15
    firsts = torch.tensor([[token] * 8 + [*range(8)] for token in (0, 1)])
    one, other = Leaking(share)(firsts, torch.zeros(()))[:, 8:]
    assert 0.05 < (one - other).abs().max() / one.abs().max() < 0.3
    config = config_of(tmp_path, "llama", dtype=dtype)
    with pytest.raises(RankError, match=r"does not separate the chats of a row.* Give --no-pack"):
        pool.run(2, leaks, config, share)


def held(config: TrainConfig) -> dict[str, int]:
    """Return the bytes of this rank's frozen and trained parameters."""
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    model = build_sharded_model(config, choose_architecture(config), world)
    kept = {"frozen": 0, "trained": 0}
    for parameter in model.parameters():
        local = local_part(parameter)
        kept["trained" if parameter.requires_grad else "frozen"] += local.nbytes
    return kept


def test_four_bits_are_an_eighth(pool: RankPool, tmp_path: Path) -> None:
    needs("qlora")
    sizes = {}
    for way in ("lora", "qlora"):
        config = config_of(tmp_path, "llama", **WAYS[way])
        sizes[way] = pool.run(2, held, config)
    linears = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)  # of two blocks, without norms
    saved = [a["frozen"] - b["frozen"] for a, b in zip(sizes["lora"], sizes["qlora"], strict=True)]
    assert sum(saved) == linears * 4 - linears // 2
    assert [one["trained"] for one in sizes["lora"]] == [one["trained"] for one in sizes["qlora"]]
    assert max(saved) <= 0.6 * sum(saved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": 4, "init": None}, "--lora needs --init"),
        ({"quantize": Quantize.NF4}, "--quantize needs --lora"),
        ({"merge": True}, "--merge needs --lora"),
        ({"lora": 4, "quantize": Quantize.NF4, "merge": True}, "cannot be merged into weights"),
        ({"lora": -1}, "--lora is -1, it must be at least 1"),
        ({"model": "2m", "init": None, "export": "x"}, "--export needs --model hf:"),
    ],
)
def test_options_that_cannot_work_together_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{"model": "hf:m", "init": "m", **options})


def test_an_export_does_not_overwrite(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", export=str(tmp_path))
    with pytest.raises(ConfigError, match="is there already; give a new folder"):
        prepare(config, num_workers=1)


@pytest.mark.parametrize("folder", ["runs/new", "runs"])
def test_an_export_does_not_go_where_the_run_is(tmp_path: Path, folder: str) -> None:
    config = config_of(tmp_path, "llama", export=str(tmp_path / folder))
    config = replace(config, out=str(tmp_path / "runs" / "new"))
    with pytest.raises(ConfigError, match="the run will be there or below"):
        prepare(config, num_workers=1)


def test_an_export_names_the_end_of_the_tokenizer_that_was_trained(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text('{"bos_token_id": 1, "eos_token_id": 2, "kept": 3}')
    text = tmp_path / "text.txt"
    text.write_text("a few words\n" * 400)
    tokenizer = load_text(str(text), vocab_size=300).tokenizer
    _write_others(tmp_path, TrainConfig(), tokenizer)
    for name in ("config.json", "generation_config.json"):
        found = json.loads((tmp_path / name).read_text())
        assert found == {"bos_token_id": 0, "eos_token_id": 0, "kept": 3}


@pytest.mark.parametrize("package", ["peft", "bitsandbytes"])
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    needs("lora" if package == "bitsandbytes" else "full")
    config = config_of(tmp_path, "llama", **WAYS["qlora"])
    with pytest.raises(ConfigError, match=f"needs {package}: pip install"):
        prepare(config, num_workers=1)


def test_the_command_tunes_on_chats_and_exports(tmp_path: Path) -> None:
    needs("lora")
    shell = Shell.with_a_little_text(tmp_path)
    config_of(shell.folder, "llama")
    with (shell.folder / "chats.jsonl").open("a") as file:
        file.write('\n{"messages": 3}\nno JSON\n')
    options = "--data chats.jsonl --steps 6 --batch 2 --seq 40 --lr 0.01 --lora 4 --nproc 1".split()
    options += ["--init", "llama", "--out", "tuned", "--export", "adapters"]
    outcome = shell.train(*options)
    assert outcome.exitcode == 2 and "error: 2 bad records, which --skip-bad" in outcome.err
    outcome = shell.train(*options, "--skip-bad")
    assert outcome.exitcode == 0, outcome.err
    assert "holds the adapters" in outcome.out
    assert "note: 2 bad records of --data left out: --data " in outcome.err
    assert {record["bad_records"] for record in shell.metrics("tuned")} == {2}
    records = [record["loss"] for record in shell.metrics("tuned")]
    assert len(records) == 6 and records[-1] < records[0]
    saved = TrainConfig.load(RunDir(shell.folder / "tuned").config)
    assert (saved.lora, saved.quantize, saved.dtype) == (4, None, Dtype.FP32)
    assert saved.init == str(shell.folder / "llama") and saved.model == f"hf:{saved.init}"
    written = {path.name for path in (shell.folder / "adapters").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= written


def test_the_example_tunes_what_it_made(tmp_path: Path) -> None:
    options = "--steps 8 --seq 64 --batch 2".split()
    command = [sys.executable, str(EXAMPLES / "finetune.py"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<|user|>What is ") == 1
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tuned, base = tmp_path / "small" / "tuned", tmp_path / "small" / "base"
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template
    first = AutoModelForCausalLM.from_pretrained(base).lm_head.weight
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(tuned).lm_head.weight, first)
