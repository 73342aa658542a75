"""The ``Trainer`` of transformers with ``fsdp_config``; saves, and resumes from a checkpoint."""

from tiny import arguments_of, llama, rows, train_and_resume
from transformers import Trainer, TrainingArguments

arguments = arguments_of(TrainingArguments, gradient_accumulation_steps=2)


def trainer(seed):
    return Trainer(llama(seed), arguments, train_dataset=rows())


train_and_resume(trainer)
