"""The reference trainer: a language model on text, written with public names only.

Read the modules in this order: ``config`` (the description of a run), ``documents`` and ``data``,
``architecture`` and ``model``, ``loop`` (shard and step), ``checkpoint``; then ``prepare``,
``launch`` and ``worker`` (start and end of a job), ``command`` and ``options`` (the command line),
``progress`` (the display).
"""
