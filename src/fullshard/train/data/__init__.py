"""Text and chats as rows of tokens, in an order that depends only on the step number."""

from __future__ import annotations

from fullshard.train.data.rows import IGNORED, Packed, Rows
from fullshard.train.data.text import LEAST_TOKENS, MOST_TOKENS, Feed, TokenizedText, load_text
from fullshard.train.data.tokenizer import PretrainedTokenizer
from fullshard.train.data.tokenizing import END
