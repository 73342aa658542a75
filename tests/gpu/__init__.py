"""Tests that need a CUDA device; without one they are skipped, and the report says so."""
