"""``fullshard completion``: shells complete commands and options."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fullshard.cli import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pl"], {"plan"}),
        (["ch"], {"checkpoint"}),
        (["checkpoint", "ver"], {"verify"}),
        (["checkpoint", "verify", "runs/x", "--"], {"--json", "--help"}),
        (["train", "--data", "text.txt", "--memory"], {"--memory-every"}),
        (["plan", "--no-r"], {"--no-reshard"}),
        (["train", "--name", "plan", "--log"], {"--log"}),
        (["nothing", "--"], {"--version", "--help"}),
    ],
)
def test_bash_completes(
    words: list[str], expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script").write_text(script("bash", capsys))
    typed = " ".join(words)
    program = (
        f"source ./script; COMP_WORDS=(fullshard {typed}); COMP_CWORD={len(words)}; _fullshard; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    found = subprocess.run(
        ["bash", "-euc", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert set(found.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_of_another_shell_has_all_words(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script(shell, capsys)
    for word in ("checkpoint", "verify", "weight-decay", "budget"):
        assert word in text
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_an_unknown_shell_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert capfd.readouterr().err.startswith("fullshard: error: ")
