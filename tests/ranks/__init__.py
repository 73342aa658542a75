"""Tests on 2, 3 and 4 gloo ranks, which all run in the session's one process pool."""
