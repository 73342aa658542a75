"""LoRA adapters of peft in the ``Trainer`` of transformers; saves and resumes."""

import sys

from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import llama, losses_of, rows
from told import tell
from transformers import Trainer, TrainingArguments

sharding = {
    "version": int(sys.argv[1]),
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": sys.argv[2],
    "use_orig_params": "flat" not in sys.argv,
    "sync_module_states": False,  # which Accelerate refuses on CPUs
}
arguments = TrainingArguments(
    "out",
    use_cpu=True,
    max_steps=4,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=2,
    report_to=[],
    disable_tqdm=True,
    label_names=["labels"],
    fsdp=True,
    fsdp_config=sharding,
)


def trainer(seed):
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(llama(seed=0), adapters)
    return Trainer(model, arguments, train_dataset=rows())


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
    saved = load_file("trained/adapter_model.safetensors")
tell(losses, again, second.model_wrapped, saved)
