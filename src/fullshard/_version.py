"""The version of fullshard."""

__version__ = "0.2.0"
