"""The version of fullshard."""

__version__ = "0.1.0"
