"""Ray Train: its ``prepare_model`` (1), or ``fully_shard`` in its workers (2).

Ray starts the workers, so each worker patches PyTorch itself if the argument is ``fullshard``.
"""

import sys
from pathlib import Path

import ray
import ray.train
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

DIM, CLASSES = 16, 5


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU())


def build(version, seed):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block(), nn.Linear(DIM, CLASSES))
    if version == 1:
        model = prepare_model(model, parallel_strategy="fsdp")
    else:
        for layer in model[:-1]:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        seed = 10 * step + dist.get_rank()
        x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(seed))
        loss = F.cross_entropy(model(x), x.argmax(-1) % CLASSES)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def work(config):
    sys.path.insert(0, config["beside"])
    if config["fullshard"]:
        from fullshard.compat import patch_torch

        patch_torch()
    import torch.distributed.checkpoint as dcp
    from told import write
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = build(config["version"], seed=0)
    losses = train(model, optimizer, range(4))
    states = dict(enumerate(get_state_dict(model, optimizer)))
    folder = Path(config["folder"]) / "saved"
    dcp.save(states, checkpoint_id=folder)
    ray.train.report({"loss": losses[-1]}, checkpoint=Checkpoint(folder))
    losses += train(model, optimizer, range(4, 8))

    model, optimizer = build(config["version"], seed=1)
    states = dict(enumerate(get_state_dict(model, optimizer)))
    with ray.train.get_checkpoint().as_directory() as found:
        dcp.load(states, checkpoint_id=found)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    again = train(model, optimizer, range(4, 8))
    write(config["folder"], losses, again, model)


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100_000_000)
    here = Path.cwd()
    TorchTrainer(
        work,
        train_loop_config={
            "version": int(sys.argv[1]),
            "fullshard": "fullshard" in sys.argv,
            "folder": str(here),
            "beside": str(Path(__file__).parent),
        },
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(here / "runs")),
    ).fit()
