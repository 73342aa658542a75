"""Small models, their data, and training runs that save and resume."""

import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from told import tell
from torch import nn

DIM, CLASSES = 16, 5

# An MLP.


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU())


def mlp():
    return nn.Sequential(Block(), Block(), nn.Linear(DIM, CLASSES))


def inputs(seed):
    return torch.randn(6, DIM, generator=torch.Generator().manual_seed(seed))


def loss_of(model, x):
    return F.cross_entropy(model(x), x.argmax(-1) % CLASSES)


# A language model, for trainers that are called ``program.py VERSION STATE_DICT_TYPE [flat]``.


def llama(seed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def rows():
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(32, (16, 9), generator=generator)
    return [{"input_ids": text, "labels": text} for text in texts]


def arguments_of(kind, **options):
    """Return training arguments of class ``kind``, which comes from transformers."""
    sharding = {
        "version": int(sys.argv[1]),
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": sys.argv[2],
        "use_orig_params": "flat" not in sys.argv,
        "sync_module_states": False,  # Accelerate refuses True on CPUs
    }
    return kind(
        "out",
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config=sharding,
        **options,
    )


def train_and_resume(trainer, weights="model.safetensors"):
    """Train, resume a second trainer from a checkpoint of the first, write results, and exit."""
    first = trainer(seed=0)
    first.train()
    second = trainer(seed=1)
    second.train(resume_from_checkpoint="out/checkpoint-2")
    losses, again = (
        [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        for one in (first, second)
    )
    saved = {}
    if sys.argv[2] == "FULL_STATE_DICT":
        second.save_model("trained")
        second.accelerator.wait_for_everyone()
        saved = load_file(f"trained/{weights}")
    tell(losses, again[2:], second.model_wrapped, saved)
