"""The ``SFTTrainer`` of TRL with ``fsdp_config``; saves, and resumes from a checkpoint."""

import sys

from datasets import Dataset
from safetensors.torch import load_file
from tiny import llama, losses_of, rows
from tokenizers import Tokenizer, models
from told import tell
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = {"<pad>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, 32)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
    pad_token="<pad>",
    eos_token="<end>",
)
dataset = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
arguments = SFTConfig(
    "out",
    use_cpu=True,
    bf16=False,
    max_steps=4,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=2,
    report_to=[],
    disable_tqdm=True,
    gradient_checkpointing="checkpointing" in sys.argv,
    fsdp=True,
    fsdp_config={
        "version": int(sys.argv[1]),
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": sys.argv[2],
        "sync_module_states": False,  # which Accelerate refuses on CPUs
    },
)


def trainer(seed):
    model = llama(seed)
    return SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)


first = trainer(seed=0)
first.train()
losses = losses_of(first)

second = trainer(seed=1)
second.train(resume_from_checkpoint="out/checkpoint-2")
again = losses_of(second)[2:]
saved = {}
if sys.argv[2] == "FULL_STATE_DICT":
    second.save_model("trained")
    second.accelerator.wait_for_everyone()
    saved = load_file("trained/model.safetensors")
tell(losses, again, second.model_wrapped, saved)
