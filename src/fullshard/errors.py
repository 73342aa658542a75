"""Every exception that fullshard raises on purpose.

    FullshardError
    |-- ConfigError             an argument is wrong                      (also ValueError)
    |   |-- ArgumentTypeError   ... because of its type                   (also TypeError)
    |   |-- AlreadyShardedError the module belongs to a unit already      (also AssertionError)
    |   |-- ExtensionError      a tensor's all-gather hooks do not fit    (also AssertionError)
    |   `-- AssertedConfigError ... that PyTorch checks by an assertion   (also AssertionError)
    |-- UnsupportedError        legal in PyTorch, but cannot be sharded   (also NotImplementedError)
    |   |-- NotBuiltError       planned, not built yet
    |   `-- RaggedOperationError  a RaggedTensor holds no rows, columns or single elements
    |-- ProtocolError           calls came in an order that cannot work   (also RuntimeError)
    |   |-- AssertedProtocolError ... that PyTorch checks by an assertion (also AssertionError)
    |   `-- BusyError           ... while parameters are lent or a pass runs (also ValueError)
    |-- LostRankError           another process is gone, or silent      (also RuntimeError)
    |-- NonFiniteError          the norm of the gradients is not finite   (also RuntimeError)
    `-- LayoutError             a layout would break its invariants       (also ValueError)

Each class is also an instance of the builtin that PyTorch raises in the same place, so that code
written for PyTorch's FSDP keeps catching what it caught. A message says what was given, what was
expected and what to do, and names the unit and the parameter.
"""

from __future__ import annotations

__all__ = [
    "AlreadyShardedError",
    "ArgumentTypeError",
    "AssertedConfigError",
    "AssertedProtocolError",
    "BusyError",
    "ConfigError",
    "ExtensionError",
    "FullshardError",
    "LayoutError",
    "LostRankError",
    "NonFiniteError",
    "NotBuiltError",
    "ProtocolError",
    "RaggedOperationError",
    "UnsupportedError",
]


class FullshardError(Exception):
    """Root of the tree: ``except FullshardError`` catches all that fullshard raises on purpose."""


class ConfigError(FullshardError, ValueError):
    """An argument has a value that cannot work; nothing was changed."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument has a type that cannot work; nothing was changed."""


class AlreadyShardedError(ConfigError, AssertionError):
    """The module was given to ``fully_shard`` before."""


class ExtensionError(ConfigError, AssertionError):
    """The all-gather hooks of a tensor do something else than their protocol says."""


class AssertedConfigError(ConfigError, AssertionError):
    """An argument that cannot work, where PyTorch fails an assertion."""


class UnsupportedError(FullshardError, NotImplementedError):
    """PyTorch allows it, but it cannot be sharded."""


class NotBuiltError(UnsupportedError):
    """Part of the documented interface that is not built yet."""


class RaggedOperationError(UnsupportedError):
    """An operation that does not mean the same on the intervals of a ``RaggedTensor``."""


class ProtocolError(FullshardError, RuntimeError):
    """Calls came in an order that cannot work, such as a forward with parameters on ``meta``."""


class AssertedProtocolError(ProtocolError, AssertionError):
    """Calls in an order that cannot work, where PyTorch fails an assertion."""


class BusyError(ProtocolError, ValueError):
    """Parameters are lent, or a forward or a backward is running; nothing was changed."""


class LostRankError(FullshardError, RuntimeError):
    """A process that this one exchanges parameters or gradients with has ended, or hangs."""


class NonFiniteError(FullshardError, RuntimeError):
    """The norm of the gradients is not finite, and the caller asked to be told."""


class LayoutError(FullshardError, ValueError):
    """A layout would break one of its invariants."""
