"""What tests of several files share: models, jobs, comparisons and programs."""
