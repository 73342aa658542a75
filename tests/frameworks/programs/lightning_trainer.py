"""The ``Trainer`` of Lightning with ``FSDPStrategy`` (1) or ``ModelParallelStrategy`` (2)."""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from tiny import DIM, Block, loss_of, mlp
from told import tell
from torch.distributed.fsdp import fully_shard

version = int(sys.argv[1])
world = int(os.environ["WORLD_SIZE"])


class Learner(lightning.LightningModule):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.net = mlp()
        self.losses = []

    def configure_model(self):
        if version == 2:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net[:-1]:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, number):
        loss = loss_of(self.net, batch)
        self.losses.append(self.trainer.strategy.reduce(loss.detach()).item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)


def fit(seed, resume_from=None):
    if version == 1:
        strategy = FSDPStrategy(auto_wrap_policy={Block}, state_dict_type=sys.argv[2])
    else:
        strategy = ModelParallelStrategy(
            data_parallel_size=world,
            tensor_parallel_size=1,
            save_distributed_checkpoint=sys.argv[2] == "sharded",
        )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=2,
        callbacks=[ModelCheckpoint("saved", filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(48, DIM, generator=torch.Generator().manual_seed(0))
    learner = Learner(seed)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(learner, loader, ckpt_path=resume_from)
    return learner, trainer


first, _ = fit(seed=0)
second, trainer = fit(seed=1, resume_from="saved/epoch=0.ckpt")
tell(first.losses, second.losses, trainer.strategy.model)
