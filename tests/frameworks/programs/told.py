"""What a program of this folder tells the test that ran it. No framework knows of this file."""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

WRAPPERS = ("FSDPModule", "FullyShardedDataParallel")


def engines():
    """How many sharded modules there are, by the package whose class they have."""
    found = {}
    for one in gc.get_objects():
        for cls in type(one).__mro__[1:] if type(one).__name__.startswith("FSDP") else ():
            if cls.__name__ == "FSDPModule":
                count(found, cls)
        if type(one).__name__ == "FullyShardedDataParallel":
            count(found, type(one))
    return found


def count(found, cls):
    package = cls.__module__.split(".")[0]
    found[package] = found.get(package, 0) + 1


def tell(losses, again, model, saved=None):
    """End the program: losses, those after loading what was saved on the way, whole weights.

    ``saved`` are weights that the framework saved whole, after training.

    A thread of gloo may let go of a Python object while the interpreter ends, which aborts the
    process, with PyTorch's own FSDP too; so it ends here.
    """
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        weights |= {f"saved {name}": value for name, value in (saved or {}).items()}
        torch.save({name: value.detach().clone() for name, value in weights.items()}, "weights.pt")
        facts = {"engines": engines(), "losses": losses, "again": again}
        Path("told.json").write_text(json.dumps(facts))
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
