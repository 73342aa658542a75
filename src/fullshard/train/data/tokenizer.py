"""The tokenizer of the weights that a run begins with, as ``transformers`` reads it."""

from __future__ import annotations

import importlib.metadata
import json
import textwrap
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fullshard.errors import ConfigError
from fullshard.train.extras import imported

_FILES = ("tokenizer.json", "*.model", "vocab.*")


class PretrainedTokenizer:
    """The tokenizer in a folder of ``transformers``.

    Attributes:
        folder: the folder.
        source: the tokenizer that ``AutoTokenizer`` loads from the folder.
        plain: the same tokens from the library ``tokenizers``: never cut or padded, and each
            token's offsets include its spaces.
        end: id of the token that ends texts.

    Raises:
        ConfigError: transformers is not installed, the tokenizer cannot be read, or the tokenizer
            has no token that ends texts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source: Any = _read(folder)
        self.plain = _plain(folder, self.source)
        end = self.source.eos_token_id
        if end is None:
            raise ConfigError(
                f"--init {folder}: its tokenizer has no eos_token, which separates documents; name "
                "it in tokenizer_config.json"
            )
        self.end: int = end
        self._check_end()

    def _check_end(self) -> None:
        """Refuse an end mark that the folder names but lacks: transformers would add it."""
        added = self.source.init_kwargs.get("added_tokens_decoder") or {}
        path = self.folder / "tokenizer.json"
        is_known = not path.exists() or Tokenizer.from_file(str(path)).id_to_token(self.end)
        if not is_known and self.end not in added:
            raise ConfigError(
                f"--init {self.folder}: its eos_token, {self.source.eos_token!r}, which separates "
                "documents, is not in tokenizer.json"
            )

    def check_size(self, vocab_size: int) -> None:
        """Raise ``ConfigError`` if the tokenizer has more tokens than the model has rows."""
        size = max(self.plain.get_vocab().values()) + 1
        if size > vocab_size:
            raise ConfigError(
                f"--init {self.folder}: {size} tokens, but the model has {vocab_size} rows"
            )

    def identity(self, *, of_chats: bool) -> str:
        """Return a text that changes with everything that decides the tokens of a document."""
        facts = [self.plain.to_str(), self.plain.encode_special_tokens, self.end]
        if of_chats:
            facts += [self.source.chat_template, self.source.special_tokens_map]
            facts += map(importlib.metadata.version, ("transformers", "jinja2"))
        return json.dumps(facts)


def _read(folder: Path) -> Any:
    # Without jinja2, transformers would fail later, with a message of its own.
    imported("jinja2", "--init", extra="hf", package="transformers")
    transformers = imported("transformers", "--init", extra="hf")
    if not any(found for pattern in _FILES for found in folder.glob(pattern)):
        raise ConfigError(f"--init {folder}: there is no tokenizer.json, which the text needs")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # OSError, ValueError, KeyError and more
        reason = textwrap.shorten(str(error), width=300)
        raise ConfigError(f"--init {folder}: its tokenizer cannot be read ({reason})") from error


def _plain(folder: Path, source: Any) -> Tokenizer:
    if not getattr(source, "is_fast", False):
        raise ConfigError(f"--init {folder}: there is no tokenizer.json, which the text needs")
    facts = json.loads(source.backend_tokenizer.to_str(), object_hook=_with_offsets)
    # A tokenizer.json keeps the truncation and padding of earlier calls.
    facts |= {"truncation": None, "padding": None}
    plain = Tokenizer.from_str(json.dumps(facts))
    plain.encode_special_tokens = bool(getattr(source, "split_special_tokens", False))
    return plain


def _with_offsets(part: dict[str, Any]) -> dict[str, Any]:
    """Make a post-processor leave offsets as they are; tokens do not change."""
    return part | {"trim_offsets": False} if "trim_offsets" in part else part
