"""Models, jobs, comparisons and programs that several test files share."""
