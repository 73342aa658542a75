"""Every exception that fullshard raises on purpose.

    FullshardError
    |-- ConfigError             an argument is wrong                      (also ValueError)
    |   |-- ArgumentTypeError   ... because of its type                   (also TypeError)
    |   |-- AlreadyShardedError the module belongs to a unit already      (also AssertionError)
    |   |-- ExtensionError      a tensor's all-gather hooks do not fit    (also AssertionError)
    |   `-- AssertedConfigError ... that PyTorch checks by an assertion   (also AssertionError)
    |-- UnsupportedError        legal in PyTorch, but cannot be sharded   (also NotImplementedError)
    |   |-- NotBuiltError       planned, not built yet
    |   `-- RaggedOperationError  needs rows, columns or single elements of a RaggedTensor
    |-- ProtocolError           calls came in an order that cannot work   (also RuntimeError)
    |   |-- AssertedProtocolError ... that PyTorch checks by an assertion (also AssertionError)
    |   `-- BusyError           ... during a loan, a forward or a backward (also ValueError)
    |-- CheckpointError         a checkpoint is damaged, or not written (also RuntimeError)
    |-- PeerError               a rank failed, so the others cannot go on (also RuntimeError)
    |   |-- FailedRankError       ... by an error of another tree, told on all ranks
    |   `-- LostRankError         ... since its process is gone, or silent
    |-- TornStepError           ranks may have stepped weights unlike     (also RuntimeError)
    |-- NonFiniteError          a loss or gradient norm is not finite     (also RuntimeError)
    |-- LayoutError             a layout would break its invariants       (also ValueError)
    `-- TorchVersionError       PyTorch lacks a name that is needed       (also ImportError)

Each class also derives from the builtin that PyTorch raises in the same place, so that code written
for PyTorch's FSDP still catches the same errors. A message says what was given, what was expected
and what to do, and names the unit and the parameter.
"""

from __future__ import annotations

__all__ = [
    "AlreadyShardedError",
    "ArgumentTypeError",
    "AssertedConfigError",
    "AssertedProtocolError",
    "BusyError",
    "CheckpointError",
    "ConfigError",
    "ExtensionError",
    "FailedRankError",
    "FullshardError",
    "LayoutError",
    "LostRankError",
    "NonFiniteError",
    "NotBuiltError",
    "PeerError",
    "ProtocolError",
    "RaggedOperationError",
    "StorageError",
    "TornStepError",
    "TorchVersionError",
    "UnsupportedError",
]


class FullshardError(Exception):
    """The root of the tree: ``except FullshardError`` catches every error raised on purpose.

    Private subclasses, which derive from one more builtin, show in tracebacks as the class of this
    module that they derive from.

    See docs/symptoms.md#fullsharderror.
    """

    def __init_subclass__(cls) -> None:
        """Name a private subclass as its base."""
        super().__init_subclass__()
        if cls.__name__.startswith("_"):
            base = cls.__bases__[0]
            cls.__name__, cls.__qualname__ = base.__name__, base.__qualname__
            cls.__module__, cls._public = base.__module__, base

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickle a private subclass as its base."""
        return self._public or type(self), self.args

    _public: type | None = None


class ConfigError(FullshardError, ValueError):
    """An argument with a value that cannot work; nothing was changed.

    See docs/symptoms.md#configerror.
    """


class ArgumentTypeError(ConfigError, TypeError):
    """An argument with a type that cannot work; nothing was changed.

    See docs/symptoms.md#argumenttypeerror.
    """


class AlreadyShardedError(ConfigError, AssertionError):
    """A module that was passed to ``fully_shard`` before.

    See docs/symptoms.md#alreadyshardederror.
    """


class ExtensionError(ConfigError, AssertionError):
    """All-gather hooks of a tensor that violate their protocol.

    See docs/symptoms.md#extensionerror.
    """


class AssertedConfigError(ConfigError, AssertionError):
    """An argument that cannot work, where PyTorch fails an assertion.

    See docs/symptoms.md#assertedconfigerror.
    """


class UnsupportedError(FullshardError, NotImplementedError):
    """A feature that PyTorch allows, but that cannot be sharded.

    See docs/symptoms.md#unsupportederror.
    """


class NotBuiltError(UnsupportedError):
    """A part of the documented interface that is not built yet.

    See docs/symptoms.md#notbuilterror.
    """


class RaggedOperationError(UnsupportedError):
    """An operation that has another meaning on the intervals of a ``RaggedTensor``.

    See docs/symptoms.md#raggedoperationerror.
    """


class ProtocolError(FullshardError, RuntimeError):
    """Calls in an order that cannot work, such as a forward with parameters on ``meta``.

    See docs/symptoms.md#protocolerror.
    """


class AssertedProtocolError(ProtocolError, AssertionError):
    """Calls in an order that cannot work, where PyTorch fails an assertion.

    See docs/symptoms.md#assertedprotocolerror.
    """


class BusyError(ProtocolError, ValueError):
    """A call during a loan of parameters, a forward or a backward; nothing was changed.

    See docs/symptoms.md#busyerror.
    """


class CheckpointError(FullshardError, RuntimeError):
    """A checkpoint that is damaged, or could not be written or read; nothing was changed.

    See docs/symptoms.md#checkpointerror.
    """


class StorageError(CheckpointError):
    """Storage that did not answer, or refused; the checkpoint itself may be intact.

    An object store out of reach, or a file that this machine cannot open: too many open files, no
    permission, a stale handle.

    See docs/symptoms.md#storageerror.
    """


class PeerError(FullshardError, RuntimeError):
    """Another rank failed in a step, which therefore ends on this rank, too.

    If processes live on, so does the model: gradients are dropped and parameters are sharded. All
    ranks may go on with the next step.

    See docs/symptoms.md#peererror.
    """


class FailedRankError(PeerError):
    """A rank failed by an error that is not of fullshard; told on all ranks.

    See docs/symptoms.md#failedrankerror.
    """


class LostRankError(PeerError):
    """A peer process, which exchanges parameters or gradients with us, that ended or hangs.

    See docs/symptoms.md#lostrankerror.
    """


class TornStepError(FullshardError, RuntimeError):
    """Weights may differ among ranks from now on; go back to a checkpoint.

    One rank caught an exception after the step's last collective, when the others had already
    stepped, or in the middle of a step of its optimizer.

    See docs/symptoms.md#tornsteperror.
    """


class NonFiniteError(FullshardError, RuntimeError):
    """A loss or gradient norm that is not finite, raised because the caller asked for the check.

    See docs/symptoms.md#nonfiniteerror.
    """


class LayoutError(FullshardError, ValueError):
    """A layout that would break one of its invariants.

    See docs/symptoms.md#layouterror.
    """


class TorchVersionError(FullshardError, ImportError):
    """A feature needs a private name of PyTorch that the installed version does not have.

    See docs/symptoms.md#torchversionerror.
    """
