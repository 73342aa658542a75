"""Tests are a package, so that a worker process can import a test's function by name."""
