"""The reference trainer: a GPT on real text, through fullshard's public names only.

Read it in this order: ``config`` (what a run is), ``data``, ``model``, ``loop`` (shard and step),
``checkpoint``; then ``prepare``, ``launch`` and ``worker`` for how a job starts and ends, and
``command`` for its options.
"""
