"""``fullshard export`` and ``fullshard generate`` for runs of two workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fullshard import checkpoint
from fullshard.cli import main
from fullshard.train.architecture import next_token_logits
from fullshard.train.config import SIZES, SaveDtype, TrainConfig
from fullshard.train.job.export import export
from fullshard.train.model import GPT
from fullshard.train.run.folder import RunDir
from tests.kit.train_chats import write_chats
from tests.kit.train_chats import write_tokenizer as write_chat_tokenizer
from tests.kit.train_init import written
from tests.kit.train_tuning import text_of, trainer_of
from tests.ranks.pool import RankPool
from tests.ranks.train_shell import Shell

pytestmark = pytest.mark.filterwarnings("ignore")  # from peft and transformers


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def trained(config: TrainConfig, losses: dict[int, float], folder: str | None) -> None:
    """Train and save each step with a given held-out loss; export the last step."""
    trainer = trainer_of(config)
    if trainer.world.is_first:
        config.save(RunDir(Path(config.out)).config)
    for step, bits in losses.items():
        trainer.record(trainer.start(step))
        trainer.bits = {step: bits}
        trainer.save(step)
    trainer.saves.wait()
    if folder is not None:
        export(trainer.model, config, text_of(config).tokenizer, trainer.world, Path(folder))


def tuning(folder: Path, **options: Any) -> TrainConfig:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    model = written(folder, "llama")
    write_chat_tokenizer(model)
    write_chats(folder / "chats.jsonl", 60)
    given = {"steps": 3, "batch": 2, "seq": 40, "lr": 3e-3, **options}
    paths = {"model": f"hf:{model}", "init": str(model), "data": str(folder / "chats.jsonl")}
    (folder / "run").mkdir()
    return TrainConfig(**paths, out=str(folder / "run"), **given)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def names_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "options", [{}, {"lora": 4}, {"lora": 4, "merge": True}], ids=["full", "lora", "merged"]
)
@pytest.mark.parametrize("dtype", [None, SaveDtype.BF16, SaveDtype.FP16])
def test_it_is_what_export_writes_at_the_end_of_the_run(
    pool: RankPool, tmp_path: Path, options: dict[str, Any], dtype: SaveDtype | None
) -> None:
    if options:
        pytest.importorskip("peft", reason="the extra lora is not installed")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    config = tuning(tmp_path, **options, export=str(theirs), save_dtype=dtype)
    pool.run(2, trained, config, {1: 2.0, 2: 1.0, 3: 1.5}, str(theirs))
    given = [] if dtype is None else ["--dtype", dtype.value]
    assert main(["export", config.out, str(ours), *given]) == 0
    assert names_of(ours) == names_of(theirs) and "tokenizer.json" in names_of(ours)
    expected, found = tensors_of(theirs), tensors_of(ours)
    assert expected and expected.keys() == found.keys()
    kinds = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, tensor in expected.items():
        assert tensor.dtype == kinds[dtype]
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6 if not dtype else 1e-3)


def test_a_tuned_model_continues_a_text_as_transformers_does(
    pool: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="the extra lora is not installed")
    config = tuning(tmp_path, lora=4, merge=True)
    pool.run(2, trained, config, {1: 2.0}, str(tmp_path / "merged"))
    capfd.readouterr()
    text = "<|user|>the answer of"
    options = "--tokens 8 --temperature 0".split()
    assert main(["generate", config.out, text, *options]) == 0
    found = capfd.readouterr().out.removesuffix("\n")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    end = tokenizer.eos_token_id
    tokens = [end, *tokenizer.encode(text, add_special_tokens=False)]
    start = len(tokens)
    while len(tokens) < start + 8 and (tokens[-1] != end or len(tokens) == start):
        logits = theirs(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits[: len(tokenizer)].argmax()))
    added = [one for one in tokens[start:] if one != end]
    assert found.startswith(text)
    assert tokenizer.encode(found, add_special_tokens=False) == tokens[1:start] + added


def test_the_best_or_any_step_can_be_exported_and_only_to_a_new_folder(
    pool: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tuning(tmp_path, keep=1)
    pool.run(2, trained, config, {1: 2.0, 2: 1.0, 3: 1.5}, None)
    run, out = RunDir(Path(config.out)), tmp_path / "out"
    assert [path.name for path in run.checkpoints.glob("step-*")] == ["step-000003"]
    assert main(["export", config.out, str(out / "best"), "--best"]) == 0
    assert main(["export", config.out, str(out / "two"), "--step", "2"]) == 0
    assert main(["export", config.out, str(out / "newest")]) == 0
    said = capfd.readouterr().out.splitlines()
    assert [line.split()[-1] for line in said] == [
        str(run.best / "step-000002"),
        str(run.best / "step-000002"),
        str(run.checkpoint(3)),
    ]
    best, two, newest = (tensors_of(out / name) for name in ("best", "two", "newest"))
    assert all(torch.equal(best[name], two[name]) for name in best)
    assert not all(torch.equal(best[name], newest[name]) for name in best)
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(out / "best").dtype == torch.float32
    for options, message in (
        ([str(out / "best")], "is there already; give a new folder"),
        (["x", "--step", "1"], "--step 1: there is no such checkpoint, but step-000003"),
        (["x", "--step", "3", "--best"], "--step with --best: give one of them"),
    ):
        assert main(["export", config.out, *options]) == 2
        assert message in capfd.readouterr().err
    (tmp_path / "llama" / "config.json").write_text(
        (tmp_path / "llama" / "config.json").read_text().replace('"gelu"', '"silu"')
        .replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )  # fmt: skip
    assert main(["export", config.out, "x"]) == 2
    assert "(num_hidden_layers is 2 there and 3 here): has its file" in capfd.readouterr().err
    assert not Path("x").exists()


def small(folder: Path) -> TrainConfig:
    """Return the configuration of a run of the built-in model on a little text."""
    shell = Shell.with_a_little_text(folder)
    (folder / "run").mkdir()
    data = str(shell.folder / "text")
    return TrainConfig(out=str(folder / "run"), data=data, steps=9, batch=2, seq=32)


def greedily(config: TrainConfig, text: str, num_tokens: int) -> str:
    """Return ``text`` and the most likely next tokens, computed with the model alone."""
    model = GPT(SIZES["2m"], max_seq=config.seq)
    checkpoint.load(RunDir(Path(config.out)).checkpoint(3), model)
    read = text_of(config)
    tokens = [read.end, *read.tokenizer.encode(text).ids]
    start = len(tokens)
    known = read.tokenizer.get_vocab_size()
    for _ in range(num_tokens):
        logits = next_token_logits(model.eval(), torch.tensor([tokens[-config.seq :]]))
        tokens.append(int(logits[0, -1, :known].argmax()))
    return text + str(read.tokenizer.decode(tokens[start:], skip_special_tokens=False))


def test_a_text_is_continued_by_the_newest_checkpoint(
    pool: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path)
    pool.run(2, trained, config, {1: 2.0, 2: 1.0, 3: 1.5}, None)

    def said(*options: str) -> str:
        assert main(["generate", config.out, "def square_1(x):", *options]) == 0
        out, err = capfd.readouterr()
        assert err == ""
        return out.removesuffix("\n")

    greedy = said("--temperature", "0", "--tokens", "40")  # more tokens than the model's context
    assert greedy == greedily(config, "def square_1(x):", 40)
    first = said("--tokens", "20", "--temperature", "2")
    assert first.startswith("def square_1(x):") and len(first) > 16
    assert said("--tokens", "20", "--temperature", "2", "--seed", "0") == first
    assert said("--tokens", "20", "--temperature", "2", "--seed", "1") != first
    assert said("--tokens", "20", "--best") == said("--tokens", "20", "--step", "2")


def test_what_cannot_be_used_is_told_in_one_line(
    pool: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path)
    run = RunDir(Path(config.out))

    def refused(message: str, *arguments: str) -> None:
        assert main([*arguments]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.startswith("fullshard: error: ") and err.count("\n") == 1
        assert message in err

    refused("holds no run of fullshard train", "generate", str(tmp_path), "a")
    config.save(run.config)
    refused("holds no complete checkpoint", "generate", config.out, "a")
    pool.run(2, trained, replace(config, keep=2), {1: float("nan")}, None)
    refused("has no best checkpoint: none of", "generate", config.out, "a", "--best")
    refused("--temperature is -1", "generate", config.out, "a", "--temperature", "-1")
    refused("--temperature is nan", "generate", config.out, "a", "--temperature", "nan")
    refused("--tokens", "generate", config.out, "a", "--tokens", "0")
    folder = str(tmp_path / "new")
    refused("trained --model 2m, an architecture that", "export", config.out, folder)
    run.tokenizer.write_text("{}")
    refused("tokenizer.json: not a tokenizer (", "generate", config.out, "a")
    assert not Path(folder).exists()


def resumed(config: TrainConfig) -> tuple[set[Any], list[float]]:
    """Resume a run; return its betas and the losses of its next steps."""
    trainer = trainer_of(config)
    first = trainer.resume(RunDir(Path(config.out)))
    records = [trainer.record(trainer.start(step)) for step in range(first + 1, first + 4)]
    groups = trainer.optimizer.param_groups
    return {group["betas"] for group in groups}, [record.loss for record in records]


def test_a_run_goes_on_with_other_betas_than_its_checkpoint_has(
    pool: RankPool, tmp_path: Path
) -> None:
    config = small(tmp_path)
    pool.run(2, trained, config, {1: 2.0, 2: 1.0}, None)
    same, changed = replace(config, resume=True), replace(config, resume=True, betas="0.2,0.6")
    betas, losses = pool.run(2, resumed, same)[0]
    other_betas, other_losses = pool.run(2, resumed, changed)[0]
    assert betas == {(0.9, 0.95)} and other_betas == {(0.2, 0.6)}
    assert losses[0] == other_losses[0]  # the same weights
    assert abs(losses[1] - other_losses[1]) > 1e-4  # the step before had other betas


def test_a_run_of_the_command_needs_its_text_no_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shell = Shell.with_a_little_text(tmp_path)
    options = "--data text --steps 2 --batch 2 --seq 32 --nproc 1 --sample off".split()
    outcome = shell.train(*options, "--out", "run")
    assert outcome.exitcode == 0, outcome.err
    (tmp_path / "text").rename(tmp_path / "elsewhere")
    assert main(["generate", str(tmp_path / "run"), "def ", "--tokens", "3"]) == 0
    assert capfd.readouterr().out.startswith("def ")
