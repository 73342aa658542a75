"""The program ``fullshard``: prints its help at once, and imports everything else for the rest.

Importing ``fullshard`` imports PyTorch, which takes seconds. So this module is not in the package.
"""

from __future__ import annotations

import gc
import shutil
import sys
import textwrap
from importlib.metadata import version

COMMANDS = {
    "train": "Train a language model on real text, fully sharded over local workers.",
    "export": "Write the model of a run, or its adapters, in the format of Hugging Face libraries.",
    "generate": "Print a text and its continuation by the model of a run.",
    "plan": "Predict memory and time of a training step; exit code 1 if it does not fit.",
    "doctor": "Examine environment, wires and speed of a job, and name common mistakes.",
    "trace": "Combine the files of all ranks into report.html, summary.json and trace.json.",
    "translate": "Translate a configuration of DeepSpeed or Accelerate into a program, with notes.",
    "completion": "Print a script that makes a shell complete commands and options.",
    "checkpoint": "Look at checkpoints, check, compare and convert them.",
}


def main() -> int:
    """Run the command line and return the exit code."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(help_text())
        return 0
    if sys.argv[1:] == ["--version"]:
        print(f"fullshard {version('fullshard')}")
        return 0
    gc.disable()  # imports leave no garbage, but many objects to look at
    from fullshard.cli import main as run

    gc.freeze()
    gc.enable()
    return run()


def help_text() -> str:
    """Return what ``fullshard --help`` prints, as ``fullshard.cli`` would."""
    width = max(min(shutil.get_terminal_size().columns, 80) - 2, 50)
    column = 2 + max(map(len, COMMANDS)) + 2
    commands = [
        textwrap.fill(
            text, width, initial_indent=f"  {name}".ljust(column), subsequent_indent=" " * column
        )
        for name, text in COMMANDS.items()
    ]
    return "\n".join(
        [
            "Usage: fullshard [OPTIONS] COMMAND [ARGS]...",
            "",
            "  Train PyTorch models too big for one device.",
            "",
            "Options:",
            "  --version   Show the version and exit.",
            "  -h, --help  Show this message and exit.",
            "",
            "Commands:",
            *commands,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
