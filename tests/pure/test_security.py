"""Promises of ``docs/security.md`` without a test elsewhere; every promise has a test."""

from __future__ import annotations

import ast
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint
from fullshard.checkpoint.format.committing import remove, remove_unfinished, write_flushed
from fullshard.checkpoint.format.manifest import MANIFEST, Manifest, digest_of
from fullshard.cli import main
from fullshard.doctor.facts import launch_variables
from fullshard.errors import CheckpointError, ConfigError
from fullshard.trace import rankfile, report
from fullshard.trace.summary import summarize
from fullshard.train.config import TrainConfig
from fullshard.train.job import launch
from fullshard.train.run.folder import RunDir
from fullshard.train.run.saves import Saves
from fullshard.train.world import launcher_rendezvous
from tests.kit.trace_report import Page
from tests.pure.import_rules import package_sources
from tests.pure.trace_files import rank_file, step, unit
from tests.ranks.train_shell import listening

ROOT = Path(__file__).parents[2]


def test_each_promise_has_its_test() -> None:
    """Every item of the first section names tests, and all named tests exist."""
    page = (ROOT / "docs" / "security.md").read_text()
    promised = page.partition("## What is promised")[2].partition("## What is not promised")[0]
    listed = re.split(r"^- ", promised, flags=re.MULTILINE)[1:]
    assert len(listed) > 15
    assert [item for item in listed if not re.search(r"`test_\w+`", item)] == []
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page)
    assert [name for name in named if f"def {name}(" not in sources] == []


# Reading files runs no code.


def call_of(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


UNPICKLED = {
    "checkpoint/conversion/torch_files.py": {"torch.load", "pickle.Unpickler"},  # restricted loads
    "comm/blocking.py": {"dist.all_gather_object", "dist.broadcast_object_list"},  # between ranks
    "comm/mesh.py": {"dist.all_gather_object"},  # between ranks
    "train/world.py": {"dist.all_gather_object"},  # between ranks
}


def test_only_these_places_unpickle() -> None:
    found: dict[str, set[str]] = {}
    suspects = r"pickle\b.*|torch\.load|.*_object(_list)?|eval|exec|marshal\..*|shelve\..*|.*yaml.*"
    for source in package_sources():
        for node in ast.walk(source.tree):
            name = call_of(node)
            bases = node.bases if isinstance(node, ast.ClassDef) else []
            for one in (name, *map(ast.unparse, bases)):
                if re.fullmatch(suspects, one):
                    found.setdefault(source.path, set()).add(one)
            if name in ("torch.load", "np.load", "numpy.load"):
                assert isinstance(node, ast.Call)
                options = {key.arg: ast.unparse(key.value) for key in node.keywords}
                assert name != "torch.load" or options["weights_only"] == "True"
                assert options.get("allow_pickle", "False") == "False"
            assert "from_pretrained" not in name or "trust_remote_code=False" in ast.unparse(node)
            assert "from_config" not in name or "trust_remote_code=False" in ast.unparse(node)
    assert found == UNPICKLED


CODE = "from pathlib import Path\nPath(__file__).with_name('it_ran').touch()\n"


@pytest.fixture
def agreeing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answer yes to all questions on a terminal; return the questions."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": [asked.append(text), "y"][1])
    return asked


def test_the_folder_of_a_model_cannot_run_code(tmp_path: Path, agreeing: list[str]) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    from fullshard.train.data.tokenizer import PretrainedTokenizer
    from fullshard.train.hf import load_hf

    (tmp_path / "own.py").write_text(CODE + "class Own: pass\n")
    own = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}
    config = {"model_type": "unheard_of", "auto_map": own, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Own", "auto_map": own}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="transformers cannot build it"):
        load_hf(str(tmp_path))
    with pytest.raises(ConfigError, match="tokenizer cannot be read"):
        PretrainedTokenizer(tmp_path)
    assert agreeing == []
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("kernel", ["somebody/kernel", "flash_attention_2"])
def test_a_configuration_cannot_name_code_of_a_hub(tmp_path: Path, kernel: str) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    from fullshard.train.hf import load_hf

    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    path = tmp_path / "config.json"
    for named, refused in (("sdpa", False), (kernel, True)):
        path.write_text(json.dumps({"model_type": "llama", "attn_implementation": named, **sizes}))
        if not refused:
            assert load_hf(str(path)).vocab_size == 8
            continue
        with pytest.raises(ConfigError, match=f"attn_implementation is '{kernel}'"):
            load_hf(str(path))


@pytest.mark.parametrize(
    "reach",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch it_ran') }}",
        "{{ messages.clear() }}",
    ],
)
def test_a_chat_template_reaches_no_code(
    tmp_path: Path, reach: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    from fullshard.train.data.chats import ChatTokenizer
    from fullshard.train.data.documents import Document
    from fullshard.train.data.tokenizer import PretrainedTokenizer
    from tests.kit.train_chats import CHATML, write_tokenizer

    monkeypatch.chdir(tmp_path)
    folder = write_tokenizer(tmp_path / "tokenizer", CHATML + reach)
    tokenizer = ChatTokenizer(PretrainedTokenizer(folder))
    chat = {"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}
    with pytest.raises(ConfigError, match=r"unsafe|undefined"):
        list(tokenizer.samples(Document("chat", json.dumps(chat), is_chat=True)))
    assert not (tmp_path / "it_ran").exists()


# Names in files cannot lead elsewhere.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder / "step-000001", nn.Linear(2, 2), step=1)
    return folder


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "a/b", ""])
def test_a_manifest_names_files_of_its_folder_alone(saved: Path, name: str) -> None:
    data = (saved / "step-000001" / MANIFEST).read_bytes()
    stored = json.loads(data)
    del stored["digest"]
    stored["files"][0]["name"] = name
    text = json.dumps(stored, separators=(",", ":"))
    changed = f'{text[:-1]},"digest":"{digest_of(text.encode())}"}}\n'.encode()
    with pytest.raises(CheckpointError, match="of rank 0"):
        Manifest.from_json(changed)


def test_what_is_removed_and_written_ends_at_links(saved: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    for name in (".unfinished-step-000002-x", "step-000003"):
        (saved / name).symlink_to(outside, target_is_directory=True)
    (saved / ".unfinished-file").symlink_to(outside / "kept")
    remove(saved / "step-000003")
    remove_unfinished(saved)
    assert (outside / "kept").read_text() == "kept"
    (saved / "latest").unlink()
    (saved / "latest").symlink_to(outside / "kept")
    write_flushed(saved / "latest", b"new")
    assert (outside / "kept").read_text() == "kept"  # write_flushed replaced the link
    assert not (saved / "latest").is_symlink()


# Permissions.


def test_files_are_as_private_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        checkpoint.save(tmp_path / "checkpoints" / "step-000001", nn.Linear(2, 2), step=1)
        rankfile.write(tmp_path, 0, rank_file(world=1))
        report.combine(tmp_path)
        TrainConfig().save(tmp_path / "config.json")
    finally:
        os.umask(before)
    found = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert len(found) >= 8
    assert [path for path in found if path.stat().st_mode & 0o077] == []


def test_a_folder_in_memory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDir, "memory", property(lambda _: tmp_path / "memory"))
    config = TrainConfig(out=str(tmp_path), memory_every=1)
    assert Saves(config).steps() == []
    assert stat.S_IMODE((tmp_path / "memory").stat().st_mode) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        Saves(config)


def test_local_workers_meet_in_a_folder_of_their_user(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def started(_: list[str], env: dict[str, str]) -> Any:
        seen.append(stat.S_IMODE(Path(env[launch.STORE]).parent.stat().st_mode))
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(launch.subprocess, "Popen", started)
    variables = dict(os.environ)
    before = os.umask(0)
    try:
        launch.start_workers(1, "-c", "")
    finally:
        os.umask(before)
    assert seen == [0o700]
    assert os.environ == variables


@pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: reads /proc")
def test_the_store_of_workers_that_may_be_killed_is_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed worker cannot block a TCP store, as it could block a store in a file."""
    seen: list[set[str]] = []

    def started(*_: object, env: dict[str, str]) -> Any:
        for name in ("RANK", "WORLD_SIZE", launch.STORE):
            monkeypatch.setenv(name, (env | {"RANK": "1", "WORLD_SIZE": "2"})[name])
        store = launcher_rendezvous()[0]["store"]
        assert isinstance(store, dist.TCPStore)
        store.set("of", "a worker")
        assert launcher_rendezvous()[0]["store"].get("of") == b"a worker"
        seen.append(listening([os.getpid()]))
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(launch.subprocess, "Popen", started)
    before = listening([os.getpid()])
    launch.start_workers(1, "-c", "", keeps_going=True)
    assert seen == [{"0100007F"} | before]
    assert listening([os.getpid()]) == before


def test_a_doctor_tells_no_secrets_of_the_environment() -> None:
    secrets = {"HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "WANDB_API_KEY": "x", "HOME": "/x"}
    assert launch_variables({**secrets, "RANK": "0"}) == {"RANK": "0"}


# Names given by users are text.


NAMES = [
    "</script><img src=x onerror=alert(1)>",
    "[red]",
    "[/nowhere]",
    "[link=x]y[/link]",
    ":cat:",
]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Path]:
    units = [unit(name) for name in NAMES]
    totals = [
        {"gathers": 1, "gather": one, "reduction": one}
        for one in [{"count": 1, "total_s": 1.0, "most_s": 1.0}] * len(units)
    ]
    found = rank_file(units=units, totals=totals, world=1, steps=[step(1)])
    rankfile.write(tmp_path, 0, found | {"host": NAMES[0]})
    yield tmp_path


def test_names_are_text_in_a_report(traced: Path) -> None:
    page = Page(report.combine(traced).page.read_text())
    assert page.count["img"] == 0
    assert json.loads(page.data)["ranks"][0]["host"] == NAMES[0]
    template = report.page({})
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", template)
    assert summarize(rankfile.read_all(traced))["ranks"][0]["host"] == NAMES[0]


def test_names_are_text_in_a_terminal(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(traced)]) == 0
    out = capsys.readouterr().out
    assert [name for name in NAMES if name not in out] == []
