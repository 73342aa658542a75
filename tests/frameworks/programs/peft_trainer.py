"""LoRA adapters of peft in the ``Trainer`` of transformers; saves and resumes."""

from peft import LoraConfig, get_peft_model
from tiny import arguments_of, llama, rows, train_and_resume
from transformers import Trainer, TrainingArguments

arguments = arguments_of(TrainingArguments, label_names=["labels"])


def trainer(seed):
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(llama(seed=0), adapters)
    return Trainer(model, arguments, train_dataset=rows())


train_and_resume(trainer, "adapter_model.safetensors")
