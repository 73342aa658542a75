"""The programs of ``docs/recipes`` run as printed, on two ranks and in small sizes.

A program assigns its sizes in lines such as ``STEPS, BATCH = 100, 32``; the test replaces only
these numbers. Programs under ``fullshard.compat``, and the program that ends with a fault, run in
their own processes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import warnings
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard
from fullshard.checkpoint import Checkpointer
from fullshard.errors import ProtocolError
from tests.ranks.models import refusal
from tests.ranks.pool import RankPool
from tests.recording import recordings

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"
SMALL = {"STEPS": 12, "BATCH": 4, "SEQ": 16, "DIM": 16, "WORKERS": 0, "TOKENS": 4}
PAGES = sorted(path.name for path in RECIPES.glob("*.md") if path.name != "index.md")
STARTED = {  # pages whose programs run in their own processes, and a part of the output
    "find-who-hangs.md": "the gather of unit blocks.2 on rank 1",
    "from-accelerate.md": "fullshard.frontend.module",
    "from-fsdp2.md": "fullshard.frontend.module",
}
PACKAGES = ("accelerate", "peft", "torchao", "transformers")
NOT_RUN = re.compile(r"<!-- not run: .+ -->\n$")
BLOCK = re.compile(r"((?:^[^\n]*\n)?)^```(python|bash|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TIMEOUT_S = 120.0  # a start takes six seconds, and many more on a loaded machine


def blocks_of(page: str, kind: str, run: bool = True) -> list[str]:
    found = BLOCK.findall((RECIPES / page).read_text())
    return [text for before, k, text in found if k == kind and run != bool(NOT_RUN.match(before))]


def program_of(page: str) -> str:
    """Return the page's program with small sizes."""
    (program,) = blocks_of(page, "python")

    def small(line: re.Match[str]) -> str:
        pairs = zip(line[1].split(", "), line[2].split(", "), strict=True)
        return f"{line[1]} = {', '.join(str(SMALL.get(name, size)) for name, size in pairs)}"

    return re.sub(r"^([A-Z]+(?:, [A-Z]+)*) = (.+)$", small, program, flags=re.MULTILINE)


def left_out(program: str, text: str) -> str:
    lines = program.splitlines(keepends=True)
    return "".join(line for line in lines if not text or text not in line)


def needed_by(page: str) -> None:
    for package in PACKAGES:
        if f"from {package}" in program_of(page) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the program of {page}")


def llama(folder: Path) -> None:
    """Write a small model to ``llama``, where readers have a real one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    config = LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)


def run_program(folder: str, page: str, without: str = "") -> tuple[str, dict[str, Any]]:
    """Run the page's program in ``folder``; return its output and its global names.

    Lines that contain ``without`` are left out.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    program = left_out(program_of(page), without)
    with chdir(folder), redirect_stdout(StringIO()) as printed, warnings.catch_warnings():
        if any(f"from {package}" in program for package in PACKAGES):
            warnings.simplefilter("ignore")  # of these packages
        exec(compile(program, page, "exec"), names)
    return printed.getvalue(), names


def run_page(folder: str, page: str) -> tuple[str, int]:
    """Return the output of the page's program, and the number of its sharded modules."""
    printed, names = run_program(folder, page)
    models = [value for value in names.values() if isinstance(value, torch.nn.Module)]
    sharded = (fullshard.FSDPModule, fullshard.FullyShardedDataParallel)
    return printed, sum(isinstance(one, sharded) for model in models for one in model.modules())


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    page: str = request.getfixturevalue("page")
    needed_by(page)
    if '"llama"' in program_of(page):
        llama(tmp_path / "llama")
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if page not in STARTED])
def test_a_program_runs_on_two_ranks(pool: RankPool, folder: Path, page: str) -> None:
    for printed, sharded in pool.run(2, run_page, str(folder), page, timeout_s=TIMEOUT_S):
        assert sharded or page == "memory.md", printed


def run(folder: Path, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", STARTED)
def test_a_program_runs_as_the_page_starts_it(folder: Path, page: str) -> None:
    (command,) = blocks_of(page, "bash", run=False)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    through = ("-m", "fullshard.compat") if "-m fullshard.compat" in command else ()
    (folder / "train.py").write_text(program_of(page))
    printed = " ".join(run(folder, *launcher, *through, "train.py").split())
    assert STARTED[page] in printed
    for text in blocks_of(page, "text"):
        assert " ".join(text.split()) in printed


# Promises of the pages


@pytest.mark.parametrize("page", ["8b-on-8-gpus.md"])
def test_the_weights_that_are_written_are_those_of_the_tuned_model(
    pool: RankPool, folder: Path, page: str
) -> None:
    from transformers import AutoModelForCausalLM

    pool.run(2, run_page, str(folder), page, timeout_s=TIMEOUT_S)
    folders = (folder / "llama", folder / "tuned")
    models = [AutoModelForCausalLM.from_pretrained(one).parameters() for one in folders]
    matrices = [pair for pair in zip(*models, strict=True) if pair[0].dim() > 1]
    assert matrices and not any(before.equal(after) for before, after in matrices)


@pytest.mark.parametrize("page", ["lora.md"])
def test_adapters_that_are_written_have_learned(pool: RankPool, folder: Path, page: str) -> None:
    from safetensors.torch import load_file

    pool.run(2, run_page, str(folder), page, timeout_s=TIMEOUT_S)
    state = load_file(folder / "adapters" / "adapter_model.safetensors")
    learned = [value.abs().max().item() for name, value in state.items() if "lora_B" in name]
    assert len(learned) == 14 and min(learned) > 0  # two layers of seven matrices


@pytest.mark.parametrize("page", ["resume-elsewhere.md", "dataloader.md"])
def test_a_run_goes_on_on_another_number_of_ranks(pool: RankPool, folder: Path, page: str) -> None:
    on_two = pool.run(2, run_page, str(folder), page)[0][0]
    (root,) = (folder / "runs").iterdir()
    assert Checkpointer(root).steps() == [10]
    on_one = pool.run(1, run_page, str(folder), page)[0][0]
    if "begin" in on_two:
        assert on_two + on_one == "2 ranks begin at step 1\n1 ranks begin at step 11\n"
        assert Checkpointer(root).steps() == [10, 20]


def gathers_of_the_head(folder: str, page: str) -> dict[str, int]:
    """Count the collectives of the head by kind."""
    with recordings() as made:
        _, names = run_program(folder, page)
    numel = names["model"].head.weight.to_local().numel()
    (head,) = (one for one in made[-1:] if one.calls and one.calls[0].numel == numel)
    kinds = [call.kind for call in head.calls]
    return {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.parametrize("page", ["chunked-loss.md"])
def test_the_head_is_gathered_and_reduced_once_a_step(
    pool: RankPool, folder: Path, page: str
) -> None:
    steps = SMALL["STEPS"]
    for counts in pool.run(2, gathers_of_the_head, str(folder), page):
        assert counts == {"all_gather": steps, "reduce_scatter": steps}


def weights_without(folder: str, page: str, text: str) -> list[list[float]]:
    """Return the head after the page's program, and after it without the lines with ``text``."""
    programs = [run_program(folder, page, without)[1] for without in ("", text)]
    return [names["model"].head.weight.to_local().flatten().tolist() for names in programs]


@pytest.mark.parametrize("page", ["chunked-loss.md"])
def test_the_result_is_the_same_with_a_gather_for_each_chunk(
    pool: RankPool, folder: Path, page: str
) -> None:
    for once, often in pool.run(2, weights_without, str(folder), page, "model.head."):
        assert once == often


def skip_without_tolerance(folder: str, page: str) -> str:
    return refusal(ProtocolError, run_program, folder, page, "set_skip_tolerance")


@pytest.mark.parametrize("page", ["text-only-batches.md"])
def test_without_tolerance_the_tower_is_named(pool: RankPool, folder: Path, page: str) -> None:
    for error in pool.run(2, skip_without_tolerance, str(folder), page):
        assert "the gather of unit vision on rank 0" in error


def weights_of_the_engine(folder: str, page: str) -> bool:
    """Return True if the engine has the weights of the model after the last step."""
    _, names = run_program(folder, page)
    found, model = names["engine"].model.state_dict(), names["model"]
    wanted = {name: param.full_tensor().bfloat16() for name, param in model.named_parameters()}
    return all(found[name].equal(value) for name, value in wanted.items())


@pytest.mark.parametrize("page", ["weights-to-an-engine.md"])
def test_the_engine_has_the_newest_weights(pool: RankPool, folder: Path, page: str) -> None:
    assert pool.run(2, weights_of_the_engine, str(folder), page) == [True, True]


def average_of(folder: str, page: str) -> float:
    """Return the largest difference between the average and the weights at the end."""
    _, names = run_program(folder, page)
    model, average = names["model"], names["average"].module
    pairs = zip(model.parameters(), average.parameters(), strict=True)
    return max((a.to_local() - b.to_local()).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("page", ["ema.md"])
def test_the_average_lags_behind_the_weights(pool: RankPool, folder: Path, page: str) -> None:
    assert all(0 < difference < 1 for difference in pool.run(2, average_of, str(folder), page))


# Commands


def commands_of(page: str) -> list[str]:
    return [line for block in blocks_of(page, "bash") for line in block.splitlines()]


def test_the_commands_of_the_memory_page_run(tmp_path: Path) -> None:
    commands = commands_of("memory.md")
    assert commands
    for command in commands:
        assert "at the peak: fits" in run(
            tmp_path, "-m", "fullshard.cli", *shlex.split(command)[1:]
        )


@pytest.mark.parametrize("page", ["profile.md"])
def test_the_command_of_the_page_makes_a_report(pool: RankPool, folder: Path, page: str) -> None:
    pool.run(2, run_page, str(folder), page)
    (command,) = commands_of(page)
    run(folder, "-m", "fullshard.cli", *shlex.split(command)[1:])
    assert (folder / "trace" / "report.html").is_file()


def test_the_script_for_slurm_is_a_script(tmp_path: Path) -> None:
    (script,) = blocks_of("slurm.md", "bash", run=False)
    assert script.startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=TIMEOUT_S)


def test_all_other_commands_say_why_they_are_not_run() -> None:
    assert [page for page in PAGES if commands_of(page)] == ["memory.md", "profile.md"]


# Pages


def test_the_index_has_each_page_once() -> None:
    rows = (RECIPES / "index.md").read_text()
    linked = re.findall(r"^\| .+\| \[[^]]+\]\(([\w-]+\.md)\) \|$", rows, re.MULTILINE)
    assert sorted(linked) == PAGES
    assert len(PAGES) >= 20


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_a_screen_with_one_program(page: str) -> None:
    text = (RECIPES / page).read_text()
    assert len(text.splitlines()) <= 70
    assert text.startswith("# ") and text.count("```python\n") == 1
