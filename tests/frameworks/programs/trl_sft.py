"""The ``SFTTrainer`` of TRL with ``fsdp_config``; saves, and resumes from a checkpoint."""

from datasets import Dataset
from tiny import arguments_of, llama, rows, train_and_resume
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = {"<pad>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, 32)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
    pad_token="<pad>",
    eos_token="<end>",
)
dataset = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
arguments = arguments_of(SFTConfig, bf16=False, gradient_checkpointing=False)


def trainer(seed):
    model = llama(seed)
    return SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)


train_and_resume(trainer)
