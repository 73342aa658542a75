"""The reference trainer: a language model on real text, through fullshard's public names only.

Read it in this order: ``config`` (what a run is), ``documents`` and ``data``, ``architecture`` and
``model``, ``loop`` (shard and step), ``checkpoint``; then ``prepare``, ``launch`` and ``worker``
for how a job starts and ends, ``command`` and ``options`` for its options, ``progress`` for what
one sees.
"""
