"""Comparison of labels among ranks, for collectives that cannot carry their labels themselves."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext

import torch
import torch.distributed as dist

from fullshard._torch import collectives as _collectives
from fullshard._torch import memory as _memory
from fullshard.comm.ledger import COMPARISON, ledger_of
from fullshard.comm.liveness import losing_ranks
from fullshard.errors import ProtocolError

AMONG_HOSTS = "a collective among hosts failed: a rank there is gone or silent"
"""The message for errors of gloo."""
_DIGEST_NBYTES = 16
_SAID_NBYTES = 256  # digest and text; a longer text is cut off, but the digest still differs


class Compared:
    """The labels of one process group that all its ranks were found to agree on.

    A label is compared only once, by a small all-gather at its first use. So a different order of
    units is noticed in the first step; in later steps it is noticed only if sizes differ.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._texts = {""}

    def knows(self, text: str) -> bool:
        """Return whether the ranks were found to agree on ``text``."""
        return text in self._texts

    def compare(
        self, group: dist.ProcessGroup, text: str, carrier: dist.ProcessGroup | None = None
    ) -> None:
        """Compare ``text``, if it is new, with the labels of the other ranks; a collective.

        Args:
            group: the process group.
            text: the label.
            carrier: a group of the same ranks that carries the labels; None: ``group``.

        Raises:
            ProtocolError: on all ranks, if any label differs.
        """
        if text in self._texts:
            return
        if not _collectives.has_peers(group, self._device_type):
            self._texts.add(text)
            return
        digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST_NBYTES).digest()
        own = (digest + text.encode())[:_SAID_NBYTES].ljust(_SAID_NBYTES, b"\0")
        with torch.inference_mode(False):
            said = torch.tensor(list(own), dtype=torch.uint8, device=self._device_type)
            heard = said.new_empty(group.size() * _SAID_NBYTES)
        if _memory.is_fake(said):
            return
        ledger = ledger_of(group)
        with ledger.starting(COMPARISON):
            with nullcontext() if carrier is None else losing_ranks(AMONG_HOSTS):
                work = _collectives.all_gather(carrier or group, [heard], [said])
                if work is not None:
                    work.wait()
            rows = heard.view(group.size(), -1).tolist()
        ledger.era.check()  # what an aborted collective leaves behind is no label
        for rank, row in enumerate(rows):
            if bytes(row) != own:
                theirs = bytes(row[_DIGEST_NBYTES:]).rstrip(b"\0").decode(errors="replace")
                raise ProtocolError(
                    f"the next collective of the process group is for {theirs} on rank {rank} of "
                    f"it and for {text} on this rank: they run different units or different "
                    "models, or in another order"
                )
        self._texts.add(text)
