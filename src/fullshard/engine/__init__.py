"""Gather, free and reduce tensors as the scheduler says; knows no ``nn.Module``.

Read ``bucket`` first (its note names every tensor), then ``unshard`` and ``reduce`` (the two paths
through a bucket), ``unit``, ``autograd`` (which tracks where backward is) and ``executor``.
``full`` is separate: it gives users full parameters to read and to write.
"""

from __future__ import annotations

from fullshard.engine.autograd import refuse_gradients
from fullshard.engine.bucket import Bucket
from fullshard.engine.dtypes import GradDtypes
from fullshard.engine.executor import Engine
from fullshard.engine.extended import check_extendable
from fullshard.engine.flat_param import FlatParameter
from fullshard.engine.full import Loan, Terms, gather_full_param, is_first, is_first_copy
from fullshard.engine.policy import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReducePolicy,
    WireErrors,
    WirePolicy,
    relative_error,
)
from fullshard.engine.reduce import Partial
from fullshard.engine.spec import BucketSpec, Offload
from fullshard.engine.unit import Registration, Unit, check_lent_alike
