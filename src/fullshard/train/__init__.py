"""The reference trainer: a language model on text, written with public names only.

Read ``config`` (the description of a run), ``architecture`` and ``model``, then ``loop``, which
shards and steps. ``loop`` uses four packages: ``data`` (text and chats as rows of tokens), ``tune``
(adapters and frozen weights), ``run`` (the folder of a run) and ``job`` (the command line, launcher
and workers).
"""
