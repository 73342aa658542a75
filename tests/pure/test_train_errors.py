"""Wrong command lines print one line, exit with code 2, and change no files."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.cli import main
from fullshard.train.config import TrainConfig
from fullshard.train.data.text import load_text
from fullshard.train.job import command, launch
from fullshard.train.run.folder import RunDir, describe
from fullshard.train.world import local_rank

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
FILES = {
    "text.txt": "".join(f"line {n}: some words {n * n}\n" for n in range(3000)),
    "other.txt": "".join(f"{n} other\n" for n in range(3000)),
    "short.txt": "a few words",
    "few.txt": "".join(f"{n} " for n in range(400)),
    "no.jsonl": '{"text": "good"}\n{"body": "bad"}\n',
    "broken.jsonl": '{"text": ',
    "rows.parquet": "",
    "llama.json": json.dumps(LLAMA),
    "few.json": json.dumps(LLAMA | {"vocab_size": 100}),
    "odd.json": json.dumps(LLAMA | {"hidden_size": 33}),
    "vit.json": json.dumps({"model_type": "vit"}),
    "t5.json": json.dumps({"model_type": "t5"}),
    "unknown.json": json.dumps({"model_type": "flat-earth"}),
    "nothing.json": "{}",
    "a_file": "",
    "unknown.toml": "step = 3",
    "word.toml": 'steps = "many"',
    "boolean.toml": "steps = true",
    "float.toml": "batch = 1.5",
    "number.toml": "data = 3",
    "choice.toml": 'dtype = "fp8"',
    "zero.toml": "steps = 0",
    "table.toml": "[train]\nsteps = 3",
    "broken.toml": "steps = ",
    "both.toml": "steps = 600\nepochs = 2",
    "sample.toml": "sample = true",
}
OPTIONS = [
    ("--unknown", "No such option: --unknown"),
    ("--steps", "Option '--steps' requires an argument"),
    ("--steps many", "--steps"),
    ("--steps 0", "--steps is 0, it must be at least 1"),
    ("--nproc 0", "--nproc is 0, it must be at least 1"),
    ("--stop-after 0", "--stop-after is 0, it must be at least 1"),
    ("--lr 0", "--lr is 0.0, it must be greater than 0"),
    ("--muon-lr 0.1", "--muon-lr needs --optimizer muon"),
    ("--optimizer muon --muon-lr 0", "--muon-lr is 0.0, it must be greater than 0"),
    ("--optimizer muon --init a_file --lora 4", "AdamW trains adapters"),
    ("--dtype fp8", "'fp8' is not one of"),
    ("--hardware h1000", "hardware 'h1000': expected one of"),
    ("--weight-decay -1", "--weight-decay is -1, it must be at least 0"),
    ("--weight-decay inf", "--weight-decay is inf, it must be at least 0"),
    ("--clip 0", "--clip is 0, it must be greater than 0"),
    ("--clip nan", "--clip is nan, it must be greater than 0"),
    ("--keep -2", "--keep is -2, it must be at least 1"),
    ("--epochs 0", "--epochs is 0, it must be greater than 0"),
    ("--epochs -1", "--epochs is -1, it must be greater than 0"),
    ("--epochs nan", "--epochs is nan, it must be greater than 0"),
    ("--epochs inf", "--epochs is inf, it must be greater than 0"),
    ("--epochs 2 --steps 600", "--steps with --epochs: give one of them"),
    ("--save-dtype bf16", "--save-dtype needs --export"),
    ("--save-dtype int8", "'int8' is not one of"),
    ("--patience -1", "--patience is -1, it must be at least 1"),
    ("--sample 0", "--sample is 0, it must be at least 1"),
    ("--sample -5", "--sample is -5, it must be at least 1"),
    ("--sample some", "--sample is some, expected off or a number of tokens"),
    ("--lr-schedule steep", "'steep' is not one of"),
    ("--warmup -1", "--warmup is -1, it must be at least 0"),
    ("--betas 0.9", "--betas is 0.9, expected two numbers with a comma, such as 0.9,0.95"),
    ("--betas 0.9,0.95,0.99", "expected two numbers with a comma"),
    ("--betas 0.9,high", "expected two numbers with a comma"),
    ("--betas 0.9,1", "--betas is 0.9,1, each must be at least 0 and less than 1"),
    ("--betas nan,0.9", "--betas is nan,0.9, each must be at least 0 and less than 1"),
    ("--name a/b", "--name a/b: must be a plain name"),
    ("--name ..", "--name ..: must be a plain name"),
    ("--seed -1", "--seed is -1, it must be at least 0"),
    ("--out a_file", "--out a_file: cannot be written"),
    ("--data . --out .", "--out .: the text is there; give another folder"),
    ("--wire int8", "--wire int8: 'int8' is no WirePolicy: expected some of gather=, reduce="),
    ("--wire gather=int4", "in 4 bits only gradients"),
    ("surplus", "unexpected extra argument"),
]
DATA = [
    ("--data nowhere", "nowhere: there is no such file or folder"),
    ("--data a_file", "a_file: holds no text"),
    ("--data no.jsonl", 'no.jsonl, line 2: expected an object with the field "text"'),
    ("--data broken.jsonl", "broken.jsonl, line 1: not JSON"),
    ("--data rows.parquet", "rows.parquet needs datasets: pip install -e '.[datasets]'"),
    ("--data short.txt", "too little text: 0 sequences of 128 tokens"),
    ("--batch 900 --accumulate 2", "and one step of 2 workers needs 3600: give more --data"),
    ("--replicas 3", "--replicas is 3, it must divide the 2 workers"),
    ("--min-workers 9", "--min-workers is 9, and there are only 2 workers"),
    ("--nproc 4 --batch 100", "and one step of 4 workers needs 400: give more --data"),
    ("--data few.txt --batch 1 --nproc 1", "too little text to hold any out"),
    ("--data few.txt --batch 1 --nproc 1 --patience 1", "too little text to hold any out"),
]
MODELS = [
    ("--model 3m", "--model is 3m, expected 2m, 10m, 125m, 1b, llama3-8b, "),
    ("--model hf:none.json", "none.json: there is no such file or folder"),
    ("--model hf:text.txt", "transformers cannot build it"),
    ("--model hf:nothing.json", "transformers cannot build it"),
    ("--model hf:unknown.json", "transformers cannot build it"),
    ("--model hf:odd.json --seq 16", "transformers cannot build it"),
    ("--model hf:t5.json --seq 16", "transformers cannot build it"),
    ("--model hf:vit.json", "a vit is no language model"),
    ("--model hf:few.json --seq 16", "has a vocabulary of 100: bytes need 257"),
    ("--model hf:llama.json --seq 65", "reads at most 64 tokens: give --seq 64 or less"),
]
CONFIGS = [
    ("--config none.toml", "none.toml: cannot be read (No such file"),
    ("--config broken.toml", "broken.toml: not TOML"),
    ("--config unknown.toml", "unknown.toml: unknown option 'step'; known are model, data, "),
    ("--config table.toml", "table.toml: unknown option 'train'"),
    ("--config word.toml", "word.toml: steps is 'many', expected a whole number"),
    ("--config boolean.toml", "boolean.toml: steps is True, expected a whole number"),
    ("--config float.toml", "float.toml: batch is 1.5, expected a whole number"),
    ("--config number.toml", "number.toml: data is 3, expected a string"),
    ("--config choice.toml", "choice.toml: dtype is 'fp8', expected one of fp32, bf16"),
    ("--config both.toml", "--config: --steps with --epochs: give one of them"),
    ("--config sample.toml", "sample is True, expected a whole number or a string"),
    ("--config zero.toml", "--steps is 0, it must be at least 1"),
]
RESUMING = [
    ("--name new", "runs/new holds no run to resume: start without --resume"),
    ("--name bare", "runs/bare holds no checkpoint to resume: start without --resume"),
    (
        "--name lost",
        "runs/lost/best/step-000002: not a checkpoint of fullshard train",
    ),
    (
        "--model 10m",
        "than --model 10m (dim is 192 there and 320 here): give its own, or start anew",
    ),
    ("--model hf:llama.json --seq 16", "step-000004 holds another model than --model hf:"),
    ("--data other.txt", "was trained on other text"),
    ("--steps 4", "is at step 4 already: a greater --steps than 4 goes on"),
    ("--stop-after 3", "is at step 4 already: a greater --stop-after than 3 goes on"),
    (
        "--epochs 0.01",
        "is at step 4 already: a greater --epochs than 0.01, or --steps than 1, goes on",
    ),
    (
        "--epochs 2 --batch 4",
        "--epochs 2: the run so far read 16 sequences of 128 tokens a step, and would read 8 of "
        "128 now, so its epochs cannot be counted: give --steps, or --batch, --accumulate "
        "and --seq of the run",
    ),
    ("--epochs 2 --seq 64", "its epochs cannot be counted"),
    (
        "--patience 2",
        "step-000004 ended the run by --patience 2: held-out loss was lowest at step 2 (1.5000 "
        "bits per byte), not in the last 2 evaluations: a greater --patience goes on",
    ),
]


def refuse_to_start(nproc: int, *arguments: str, keeps_going: bool) -> None:
    raise AssertionError("a worker was started")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder with ``FILES``, without a launcher's variables, and start no workers."""
    for name in (*LAUNCHED, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(launch, "start_workers", refuse_to_start)
    monkeypatch.setitem(sys.modules, "datasets", None)
    here = tmp_path / "here"
    here.mkdir()
    for name, text in FILES.items():
        (here / name).write_text(text)
    monkeypatch.chdir(here)
    return here


def tree(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_refused(
    folder: Path, options: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = tree(folder)
    data = [] if "--data" in options else ["--data", "text.txt"]
    assert main(["train", *data, *options.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("fullshard: error: ")
    assert err.endswith("\n") and err.count("\n") == 1
    assert message in err
    assert tree(folder) == before


@pytest.mark.parametrize(("options", "message"), OPTIONS + DATA + CONFIGS)
def test_a_start_that_cannot_work_is_refused(
    options: str, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(folder, options, message, capfd)


@pytest.mark.parametrize(("options", "message"), MODELS)
def test_a_model_that_cannot_be_built_is_refused(
    options: str, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    assert_refused(folder, options, message, capfd)


def test_transformers_that_is_missing_is_named_with_its_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    message = "llama.json needs transformers: pip install -e '.[hf]'"
    assert_refused(folder, "--model hf:llama.json", message, capfd)


@pytest.mark.parametrize(("options", "message"), RESUMING)
def test_a_run_that_cannot_go_on_is_refused(
    options: str, message: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(data=str(folder / "text.txt"), steps=9)
    key = load_text(config.data, vocab_size=2048).key
    model = {"dim": 192, "num_layers": 4, "num_heads": 4, "ffn_dim": 512, "vocab_size": 2048}
    path = RunDir(folder / "runs" / "default").checkpoints / "step-000004"
    origin = describe(config, model, step=4, text_key=key, num_workers=2)
    held_out = {"step": 2, "bits_per_byte": 1.5, "num_worse": 2}
    origin = replace(origin, held_out=held_out)
    checkpoint.save(path, nn.Linear(1, 1), extra=asdict(origin), step=4)
    best = RunDir(folder / "runs" / "lost")
    checkpoint.save(best.best / "step-000002", nn.Linear(1, 1), step=2)
    best.best_mark.write_text('{"step": 2, "eval_bits_per_byte": 1.5}')
    (folder / "runs" / "bare").mkdir()
    for name in ("default", "bare", "lost"):
        config.save(RunDir(folder / "runs" / name).config)
    assert_refused(folder, f"--resume {options}", message, capfd)


def test_more_workers_than_gpus_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert_refused(folder, "--nproc 3", "3 workers on a machine with 2 GPUs", capfd)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--nproc 2", "--nproc is 2, but torchrun started 4 workers on this machine"),
        ("--min-workers 1", "see its --max-restarts: leave --min-workers out"),
    ],
)
def test_under_torchrun_the_first_worker_alone_says_what_does_not_fit(
    options: str,
    message: str,
    rank: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    if rank == "0":
        assert_refused(folder, options, message, capfd)
    else:
        assert main(["train", *options.split()]) == 2
        assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("options", ["", "--min-workers 0"])
def test_torchrun_resumes_a_run_of_workers_that_could_be_fewer(
    options: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(folder / "run")
    run.path.mkdir()
    replace(TrainConfig(), min_workers=1).save(run.config)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    started: list[TrainConfig] = []
    monkeypatch.setattr(command, "work", lambda config, prepared: started.append(config))
    monkeypatch.setattr(command, "check_launched", lambda: None)
    monkeypatch.setattr(command, "launch", lambda config: 0)
    assert main(["train", "--out", str(run.path), "--resume", *options.split()]) == 0
    assert started[0].min_workers is None and started[0].resume


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize("missing", list(LAUNCHED))
def test_half_of_a_launchers_environment_is_refused(
    missing: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    given = {name: value for name, value in LAUNCHED.items() if name != missing}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    message = f"the environment has {', '.join(given)}, but not {missing}: start workers by"
    assert_refused(folder, "", message, capfd)


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_a_worker_without_local_rank_takes_the_only_gpu(
    gpus: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    if gpus > 1:
        message = (
            "RANK is set, but LOCAL_RANK is not, and this machine has 8 GPUs. Start the workers"
        )
        assert_refused(folder, "", message, capfd)
        return
    began = []
    monkeypatch.setattr(command, "work", lambda config, *, prepared: began.append(local_rank()))
    monkeypatch.setattr(command, "launch", lambda config: 0)
    assert main(["train", "--data", "text.txt"]) == 0
    assert began == [0]
