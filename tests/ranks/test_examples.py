"""The examples, and the programs and figures of the pages for users.

The programs run in processes of their own, as a user starts them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.device import BufferKind
from fullshard.frontend.ownership import unit_of
from tests.kit.examples import EXAMPLES, ROOT, TORCHRUN, run
from tests.ranks.pool import RankPool
from tests.recording import recordings

# examples/


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", printed, re.MULTILINE)]


class Learns(NamedTuple):
    """Expected output of an example beside falling losses."""

    name: str
    last: float  # upper bound of the last loss
    says: str


EACH = [
    Learns("minimal.py", 2.8, "2 x 49,984  repeated block"),
    Learns("int8_gather.py", 0.9, "Int8Gathered sends 26% of its bytes"),
    Learns("migrate_fsdp1.py", 1.0, "saved 28 tensors, and the moments of 28 parameters"),
    Learns("migrate_fsdp2.py", 1.5, "RaggedTensor of (256, 64), this process keeps"),
    Learns("save_memory.py", 0.6, "weights stay torch.float32, this process keeps (128, 64)"),
    Learns(
        "tensor_parallel.py", 0.2, "(192, 48) placed (_StridedShard(dim=0, sf=2), Shard(dim=0))"
    ),
    Learns("transformers_model.py", 2.5, "LlamaForCausalLM"),
]


def test_the_tour_is_a_program(tmp_path: Path) -> None:
    """The cells of the notebook run one after the other in one process."""
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "tour.py").write_text("\n".join(code))
    out = run(tmp_path, "tour.py")
    for words in ("repeated block", "loss 6.43 -> ", "at the peak: fits", "rank-00000.json"):
        assert words in out


@pytest.mark.parametrize("example", EACH, ids=lambda one: one.name)
def test_an_example_learns_on_two_processes(example: Learns, tmp_path: Path) -> None:
    if example.name == "transformers_model.py":
        pytest.importorskip("transformers")
    printed = run(tmp_path, *TORCHRUN, str(EXAMPLES / example.name))
    losses = losses_in(printed)
    assert len(losses) > 3, printed
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < example.last < losses[0]
    assert printed.count(example.says) == 1


def test_an_example_learns_without_a_launcher(tmp_path: Path) -> None:
    losses = losses_in(run(tmp_path, str(EXAMPLES / "minimal.py")))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 2.8 < losses[0]


def test_a_checkpoint_of_two_processes_goes_on_on_one(tmp_path: Path) -> None:
    program = str(EXAMPLES / "checkpoint.py")
    on_two = run(tmp_path, *TORCHRUN, program, "run").splitlines()
    on_one = run(tmp_path, program, "run").splitlines()
    losses = [float(line.split()[-1]) for line in (*on_two, *on_one)]
    heads = [line.split(": ")[0] for line in (*on_two, *on_one)]
    assert heads == [
        "start at step 0 on 2",
        "end at step 30 on 2",
        "start at step 30 on 1",
        "end at step 60 on 1",
    ]
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert losses[3] < losses[2] < losses[0] / 10


def test_what_is_exported_is_what_was_averaged(tmp_path: Path) -> None:
    program = str(EXAMPLES / "export.py")
    for start in ((*TORCHRUN, program), (program,)):
        printed = run(tmp_path, *start, "model.safetensors")
        trained, averaged, exported = map(float, re.findall(r"\d+\.\d+", printed))
        assert averaged == pytest.approx(exported, rel=1e-4)
        assert averaged != trained and max(averaged, trained) < 20


# docs/quickstart.md


class Program(NamedTuple):
    """A Python block of a page, and the text block after it: the output on two processes."""

    title: str
    source: str
    printed: str | None


def programs_of(page: Path) -> list[Program]:
    programs: list[Program] = []
    blocks = r"^## ([^\n]+)$|^```(python|text)\n(.*?)^```$"
    title = ""
    for heading, kind, block in re.findall(blocks, page.read_text(), re.DOTALL | re.MULTILINE):
        if heading:
            title = heading
        elif kind == "python":
            programs.append(Program(title, block, None))
        else:
            programs[-1] = programs[-1]._replace(printed=block)
    return programs


QUICKSTART = programs_of(ROOT / "docs" / "quickstart.md")

# All programs share one start. The page's first program runs before each of them.
RUNNER = """
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch.distributed as dist

printed = []
first, *others = json.loads(Path("programs.json").read_text())
for number, source in enumerate(["", *others], 1):
    names = {"__name__": "__main__"}
    with redirect_stdout(StringIO()) as before:
        exec(compile(first, "program 1", "exec"), names)
    with redirect_stdout(StringIO()) as own:
        exec(compile(source, f"program {number}", "exec"), names)
    printed.append((own if number > 1 else before).getvalue())
if dist.get_rank() == 0:
    Path("printed.json").write_text(json.dumps(printed))
dist.barrier()
dist.destroy_process_group()
"""


def run_quickstart(folder: Path, *launcher: str, logged: str = "") -> list[str]:
    (folder / "programs.json").write_text(json.dumps([p.source for p in QUICKSTART]))
    (folder / "runner.py").write_text(RUNNER)
    assert run(folder, *launcher, "runner.py", logged=logged) == ""
    printed: list[str] = json.loads((folder / "printed.json").read_text())
    return printed


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run_quickstart(tmp_path_factory.mktemp("quickstart"), *TORCHRUN)


@pytest.mark.parametrize("number", range(len(QUICKSTART)), ids=lambda n: QUICKSTART[n].title)
def test_a_program_of_the_quickstart_prints_what_the_page_says(
    number: int, on_two_processes: list[str]
) -> None:
    """Words and whole numbers are equal; fractions agree to 5%, as they depend on the processor."""
    said = re.split(r"(\d+\.\d+)", QUICKSTART[number].printed or "")
    found = re.split(r"(\d+\.\d+)", on_two_processes[number])
    assert found[::2] == said[::2]
    assert list(map(float, found[1::2])) == pytest.approx(list(map(float, said[1::2])), rel=0.05)


def test_the_quickstart_runs_on_one_process_and_again_in_the_same_folder(tmp_path: Path) -> None:
    first = run_quickstart(tmp_path)
    assert len(first) == len(QUICKSTART)
    logged = r"checkpoints/step-000200 was saved; .* renamed to step-000200\.replaced-\w+\n"
    assert run_quickstart(tmp_path, logged=logged) == first


# docs/concepts.md


class Stack(nn.Module):
    """The page's model: four blocks of a million parameters, and a norm of two thousand."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1000, 1000, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(1000)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        y: Tensor = self.norm(x)
        return y


class Figures(NamedTuple):
    """The communication and memory of one step on a rank."""

    gathers: int
    reductions: int
    peak_mb: str  # unsharded parameters
    between_mb: str  # unsharded parameters between forward and backward
    sent_mb: str  # bytes to each other rank in all gathers of the step


def figures_of_a_step(
    reshard_after_forward: bool | None, budget: int | None, param_dtype: torch.dtype | None
) -> Figures:
    model = Stack()
    policy = fullshard.MixedPrecisionPolicy(param_dtype=param_dtype)
    with recordings() as made:
        fullshard.shard_blocks(model, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    model.set_prefetch_budget(budget)
    unit = unit_of(model)
    assert unit is not None
    meter = unit.engine.meter
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # the second step prefetches in forward too
        for recording in made:
            recording.calls.clear()
        meter.reset_peak()
        loss = model(torch.ones(2, 1000)).float().square().mean()
        between = meter.held_nbytes[BufferKind.UNSHARDED]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    calls = [call for recording in made for call in recording.calls]
    gathers = [call for call in calls if call.kind == "all_gather"]
    return Figures(
        len(gathers),
        len(calls) - len(gathers),
        f"{meter.peak_nbytes[BufferKind.UNSHARDED] / 1e6:.1f}",
        f"{between / 1e6:.1f}",
        f"{sum(call.numel * call.dtype.itemsize for call in gathers) / 1e6:.1f}",
    )


def test_the_figures_of_the_concepts_are_those_of_a_step(pool: RankPool) -> None:
    page = " ".join((ROOT / "docs" / "concepts.md").read_text().split())

    def measured(
        after: bool | None = None, budget: int | None = None, dtype: torch.dtype | None = None
    ) -> Figures:
        first, second = pool.run(2, figures_of_a_step, after, budget, dtype)
        assert first == second
        figures: Figures = first
        return figures

    for after, name in ((None, "`None`, the default"), (True, "`True`"), (False, "`False`")):
        found = measured(after)
        row = f"| {name} | {found.gathers} | {found.between_mb} MB | {found.peak_mb} MB |"
        assert row in page
        assert found.reductions == 5
    for budget, name in ((0, "0"), (None, "`None`, one unit ahead"), (12_000_000, "12,000,000")):
        assert f"| {name} | {measured(budget=budget).peak_mb} MB |" in page
    fp32, bf16 = measured(), measured(dtype=torch.bfloat16)
    assert f"sends {bf16.sent_mb} MB instead of {fp32.sent_mb} MB of parameters" in page
    held = f"holds at most {bf16.peak_mb} MB instead of {fp32.peak_mb} MB of unsharded parameters"
    assert held in page
