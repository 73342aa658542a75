"""Tests that need no process group, and take seconds."""
