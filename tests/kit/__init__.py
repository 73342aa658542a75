"""Models, jobs, comparisons and programs for tests of several files."""
