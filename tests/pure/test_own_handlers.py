"""fullshard's handlers of DTensor operations, which one thread may bypass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor


def test_other_threads_find_a_handler_that_one_does_without() -> None:
    dispatcher = DTensor._op_dispatcher

    def is_handled() -> bool:
        return operation in dispatcher._custom_op_handlers

    def operation() -> tuple[bool, bool]:
        with ThreadPoolExecutor(1) as other:
            return is_handled(), other.submit(is_handled).result()

    _dtensor.handle_dtensor_op(operation, object())
    try:
        assert _dtensor.default_dtensor_op(operation, (), {}) == (False, True)
        assert is_handled()
    finally:
        del dispatcher._custom_op_handlers[operation]
