"""Chooses the tests of ``make test``: the cheapest tests that notice small defects in ``src``.

A *mutant* is ``src`` with one small defect, such as ``<`` for ``<=``. A test *kills* it by failing.

    python -m tests.mutants record               # runs all tests, and notes the blocks each enters
    python -m tests.mutants choose               # the cheapest tests that enter every entered block
    python -m tests.mutants kill --count 300     # adds tests that kill what the chosen tests miss
    python -m tests.mutants write                # writes tests/left_out.txt

Each command uses the results of the one before, in ``build/mutants``. ``record`` and ``kill`` go on
after an interruption. Delete the folder to start again.
"""
