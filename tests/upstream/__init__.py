"""PyTorch's own tests of FSDP, run on a CPU over gloo, on PyTorch's engine and on ours.

    python -m tests.upstream FOLDER             # every test_*.py in it, with a table of results
    python -m tests.upstream FOLDER -k parity   # tests with this word

The files are PyTorch's, fetched by hand from a version near the installed one; none is kept here.
``stand_in`` replaces what the files import, and GPU names in their text, as it loads them. A test
counts only if it passes on PyTorch's own engine.
"""
