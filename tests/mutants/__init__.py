"""Which tests `make test` runs, chosen by which of them notice small defects in ``src``.

A *mutant* is ``src`` with one small defect, such as ``<`` for ``<=``. A test *kills* it by failing.

    python -m tests.mutants record               # runs all tests, notes the blocks that each enters
    python -m tests.mutants choose               # the cheapest tests that enter what all enter
    python -m tests.mutants kill --count 300     # adds tests until they kill what all tests kill
    python -m tests.mutants write                # writes tests/left_out.txt

Everything is kept in ``build/mutants``, and each command goes on where the one before ended.
"""
