"""PyTorch's own tests of FSDP, run on a CPU over gloo, on PyTorch's engine and on fullshard.

    python -m tests.upstream FOLDER             # every test_*.py in it, with a table of results
    python -m tests.upstream FOLDER -k parity   # tests with this word

The files come from a PyTorch version near the installed one, and must be downloaded by hand.
``stand_in`` replaces their imports, and the GPU names in their text, on loading. A test counts only
if it passes on PyTorch's own engine.
"""
