"""Each command on a page runs as written, or a line here says where it runs, or why not.

Pages show commands in blocks and in backticks. Words in capitals, such as ``FOLDER``, and dots are
placeholders. The options, targets and files of each command exist.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from bench.__main__ import NAMES
from fullshard.cli import app, main
from fullshard.train.__main__ import app as train_app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
A_COMMAND = re.compile(r"([A-Z_]+=\S+ )?(fullshard|python|make|torchrun|pip|srun) .*\S|HEAD=.*")

RUN_HERE = (
    r"fullshard plan 1b --world-size (16 --batch 4|64 --optimizer muon)( --budget 16GB)?",
    r"fullshard plan 2m --world-size 8 --hardware cpu --seq 64 --measure",
    r"fullshard plan 125m --world-size 8 --batch 4 --dtype bf16",
    r"fullshard plan (llama3-70b --world-size 1024|deepseek-v3 --world-size 4096)",
    r"fullshard doctor",
    r"fullshard train --help",
)
"""Commands that take seconds and write nothing."""

TESTED = {
    r"(make|fullshard) train( ARGS=.--(steps 40|resume).)?": "tests/ranks/test_train.py",
    r"fullshard train --out runs/mine --resume": "tests/ranks/test_train_ending.py",
    r"make train ARGS=.--name mine --data notes/.": "tests/pure/test_train_command.py",
    r"make train ARGS=.--(model 10m|config).*": "tests/pure/test_train_command.py",
    r"make train ARGS=.--model hf:.*": "tests/ranks/test_train_models.py",
    r"(make|fullshard) train .*--optimizer muon.*": "tests/ranks/test_train_muon.py",
    r"(make|fullshard) train .*--(init|quantize|lora).*": "tests/ranks/test_train_tuning.py",
    r"fullshard train --(trace|max-skipped N)": "tests/ranks/test_train.py",
    r"fullshard train --(min-workers|memory-every).*": "tests/ranks/test_train_survivors.py",
    r"fullshard train --wire": "tests/ranks/test_train_wire.py",
    r"fullshard (export|generate) .*|fullshard export": "tests/ranks/test_train_finished.py",
    r"fullshard checkpoint .*": "tests/pure/test_checkpoint_command.py",
    r"fullshard trace .*": "tests/pure/test_trace_report.py",
    r"fullshard completion bash > ~/.fullshard-completion": "tests/pure/test_completion.py",
    r"fullshard translate (ds_config.json|fsdp.yaml)": "tests/pure/test_translate.py",
    r"fullshard plan( (MODEL|MODULE:|hf:|--wire).*)?": "tests/pure/test_plan_command.py",
    r"fullshard plan --measure": "tests/pure/test_plan_measured.py",
    r"fullshard doctor --calibrate|python -m fullshard.cli doctor": "tests/ranks/test_doctor.py",
    r"(torchrun .*|python )-m fullshard.train.*": "tests/ranks/test_train_world.py",
    r"(torchrun .*|python )-m fullshard.compat .*": "tests/ranks/test_compat_run.py",
    r"(FULLSHARD_PATIENCE_S=5 )?(torchrun .*|python )train.py": "tests/ranks/test_recipes.py",
    r"python examples/.*": "tests/ranks/test_examples.py",
    r"python -m tests.faults (table|recover).*": "tests/faults/test_table.py",
    r"TMPDIR=/dev/shm python -m tests.faults random .*": "tests/faults/test_random.py",
    r"python -m tests.fuzz --ranks 1-4": "tests/fuzz/test_fuzz.py",
    r"python -m tests.lanes.mutations .*": "tests/lanes/test_lanes.py",
    r"python -m tests.ranks.object_kills 100": "tests/ranks/test_checkpoint_stores.py",
    r"python -m tests.pure.owners_table": "tests/pure/test_owners.py",
    r"make docs": "tests/docs/test_site.py",
}
"""The file that tests a command, with small models, a few steps or a few faults."""

NOT_RUN = {
    r"make (test|check)\b.*|python -m pytest .*": "tests do not start tests",
    r"make bench|python -m bench\b.*": "wants an idle machine, or a GPU; docs/benchmarks.md tells",
    r"pip install .*": "an environment is not changed by its tests; `make dist` installs the wheel",
    r"(HEAD=|srun ).*": "wants Slurm, which was never at hand",
    r"torchrun --(standalone|nproc-per-node 2)": "the start of a command",
}


def commands_of(page: Path) -> list[str]:
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    text = page.read_text().replace("\\\n", "")
    blocks = [body for kind, body in fence.findall(text) if kind not in ("python", "toml", "text")]
    lines = [re.sub(r"\s+# .*", "", line).strip() for body in blocks for line in body.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", fence.sub("", text))
    return [re.sub(" +", " ", line) for line in lines if A_COMMAND.fullmatch(line)]


TEXTS = sorted({text for page in PAGES for text in commands_of(page)})
HERE = [text for text in TEXTS if any(re.fullmatch(pattern, text) for pattern in RUN_HERE)]


def options_of(command: Any) -> set[str]:
    return {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Split the words into a subcommand of ``fullshard`` and its arguments."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def test_each_command_has_one_answer() -> None:
    answers = [*RUN_HERE, *TESTED, *NOT_RUN]
    for text in TEXTS:
        matching = [one for one in answers if re.fullmatch(one, text)]
        assert matching, f"{text}: name its test in this file, or why it has none"
    unused = [one for one in answers if not any(re.fullmatch(one, text) for text in TEXTS)]
    assert unused == []
    assert [file for file in TESTED.values() if not (ROOT / file).is_file()] == []
    assert len(TEXTS) > 100


TRAINED = [text for text in TEXTS if re.match("(make|fullshard) train .*--", text)]


@pytest.mark.parametrize("text", [text for text in TRAINED if text not in HERE])
def test_the_file_named_for_a_training_gives_its_first_option(text: str) -> None:
    file = next(file for one, file in TESTED.items() if re.fullmatch(one, text))
    assert re.findall(r"--[a-z-]+", text)[0] in (ROOT / file).read_text()


@pytest.mark.parametrize("text", HERE)
def test_a_command_runs_as_written(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(text)[1:]) in (0, 1)  # 1: a finding, or a model that does not fit
    assert capfd.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", TEXTS)
def test_options_targets_and_files_of_a_command_exist(text: str) -> None:
    words = shlex.split(text.replace("...", ""))
    program, names = words[0], words[1:]
    known: set[str] = set()
    if program == "make":
        assert f"\n{names[0]}:" in (ROOT / "Makefile").read_text()
        inner = shlex.split(next((w[5:] for w in names if w.startswith("ARGS=")), ""))
        if names[0] == "train":
            known, names = options_of(command_of(["train"])[0]), inner
        else:
            known, names = {"--lanes", "-k"}, inner
    elif program == "fullshard":
        command, names = command_of(names)
        known = options_of(command) | {"--help"}
    elif "fullshard.train" in names:
        known = options_of(typer.main.get_command(train_app))
        names = names[names.index("fullshard.train") + 1 :]
    elif names[:2] == ["-m", "bench"]:
        assert names[2] in {*NAMES, "NAME", "[NAME"}
        names = []
    else:
        names = [word for word in names if not word.startswith("-")]
    assert [word for word in names if word.startswith("-") and word not in known] == []
    files = [word for word in words if re.fullmatch(r"(ARGS=)?(tests|examples)/\S+", word)]
    assert [file for file in files if not (ROOT / file.removeprefix("ARGS=")).exists()] == []
