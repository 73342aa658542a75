"""The model of a run, loaded from a checkpoint in one process, for export or generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from fullshard.checkpoint import list_checkpoints, load
from fullshard.errors import ConfigError
from fullshard.train.architecture import choose_architecture, load_text_for
from fullshard.train.config import HF, SaveDtype, TrainConfig
from fullshard.train.data import END, PretrainedTokenizer
from fullshard.train.job.export import export
from fullshard.train.job.sample import continued
from fullshard.train.loop import build_on_meta, fill
from fullshard.train.run import RunDir, check_frozen, difference, read_best, read_origin
from fullshard.train.world import World

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that ended, or was interrupted, and its configuration."""

    run: RunDir
    config: TrainConfig

    @classmethod
    def at(cls, folder: Path) -> FinishedRun:
        """Read the run in ``folder``; raise ``ConfigError`` if there is none."""
        run = RunDir(folder)
        if not run.config.exists():
            raise ConfigError(f"{folder} holds no run of fullshard train: there is no config.json")
        config = TrainConfig.load(run.config)
        return cls(run, replace(config, out=str(folder), resume=True))  # draws no weights

    def checkpoint(self, *, step: int | None = None, best: bool = False) -> Path:
        """Return a complete checkpoint: of ``step``, or the best, or else the newest.

        Raises:
            ConfigError: there is no such checkpoint, or both ``step`` and ``best`` are given.
        """
        if best and step is not None:
            raise ConfigError("--step with --best: give one of them")
        if best:
            marked = read_best(self.run)
            if marked is None:
                raise ConfigError(
                    f"{self.run.path} has no best checkpoint: none of a step that was evaluated"
                )
            return marked.path
        found = None if step is None else self.run.complete(step)
        if found is not None:
            return found
        newest = self.run.newest_checkpoint()
        if newest is None:
            raise ConfigError(f"{self.run.path} holds no complete checkpoint")
        if step is not None:
            names = ", ".join(info.path.name for info in list_checkpoints(self.run.checkpoints))
            raise ConfigError(f"--step {step}: there is no such checkpoint, but {names}")
        return newest

    def export(self, checkpoint: Path, folder: Path, dtype: SaveDtype | None) -> None:
        """Write the model of a checkpoint, or its adapters, as ``--export`` does.

        Raises:
            ConfigError: the model is not one of transformers, or ``folder`` exists.
        """
        if not self.config.model.startswith(HF):
            raise ConfigError(
                f"{self.run.path} trained --model {self.config.model}, an architecture that "
                "transformers does not have: only runs with --init or --model hf:CONFIG.json can "
                "be exported"
            )
        if folder.exists():
            raise ConfigError(f"{folder}: is there already; give a new folder")
        config = replace(
            self.config, export=str(folder), save_dtype=dtype or self.config.save_dtype
        )
        model = self.load(checkpoint, _CPU)
        export(model, config, self._tokenizer()[0], World(0, 1, _CPU), folder)

    def continued(
        self, checkpoint: Path, text: str, *, num_tokens: int, temperature: float, seed: int
    ) -> str:
        """Return ``text`` with its continuation by the model of a checkpoint."""
        tokenizer, end = self._tokenizer()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = self.load(checkpoint, device)
        prompt = [end, *tokenizer.encode(text, add_special_tokens=False).ids]
        tokens = continued(
            model,
            prompt,
            device=device,
            known=tokenizer.get_vocab_size(),
            context=self.config.seq,
            num_tokens=num_tokens,
            temperature=temperature,
            seed=seed,
            end=end,
        )
        added = tokens[len(prompt) :]
        return text + _decoded_after(tokenizer, prompt[1:], [one for one in added if one != end])

    def load(self, checkpoint: Path, device: torch.device) -> nn.Module:
        """Return the whole model of a checkpoint, on ``device``.

        Raises:
            ConfigError: ``--model`` has changed since the checkpoint.
            CheckpointError: the checkpoint is damaged.
        """
        config = self.config
        architecture = choose_architecture(config)
        info, ours = read_origin(checkpoint), architecture.description()
        if info.model != ours:
            raise ConfigError(
                f"{checkpoint} holds another model than --model {config.model} "
                f"({difference(info.model, ours)}): has its file changed since the run?"
            )
        check_frozen(config, checkpoint, info)
        if config.lora is None:
            with torch.device(device):
                model = architecture.build(seq=config.seq, checkpoint_activations=False)
        else:
            model = build_on_meta(config, architecture)
            fill(model, config, architecture, device)
            model.to(device)
        load(checkpoint, model)
        return model.eval()

    def _tokenizer(self) -> tuple[Tokenizer, int]:
        """Return the tokenizer, and the token that marks the start and the end of texts."""
        if self.config.init is not None:
            given = PretrainedTokenizer(Path(self.config.init))
            return given.plain, given.end
        if not self.run.tokenizer.exists():  # an earlier version wrote no tokenizer: load the text
            text = load_text_for(choose_architecture(self.config), self.config)
            return text.tokenizer, text.end
        try:
            tokenizer = Tokenizer.from_file(str(self.run.tokenizer))
        except Exception as error:  # tokenizers has no class of its own
            raise ConfigError(f"{self.run.tokenizer}: not a tokenizer ({error})") from error
        end = tokenizer.token_to_id(END)
        if end is None:
            raise ConfigError(f"{self.run.tokenizer}: has no token {END}")
        return tokenizer, end


def _decoded_after(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str:
    """Return the text of ``tokens`` after ``before``, with any space between the two."""
    whole: str = tokenizer.decode([*before, *tokens], skip_special_tokens=False)
    start: str = tokenizer.decode(before, skip_special_tokens=False)
    if whole.startswith(start):
        return whole[len(start) :]
    return str(tokenizer.decode(tokens, skip_special_tokens=False))
