"""A Llama of Hugging Face's, made from a config, trained and sampled while it is sharded.

    pip install -e '.[hf]'
    python examples/transformers_model.py
    torchrun --nproc-per-node 2 examples/transformers_model.py

Any causal language model of ``transformers`` goes the same way. Takes seconds on a CPU; nothing is
downloaded.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import fullshard

STEPS, BATCH, TIME = 60, 16, 64

config = LlamaConfig(
    vocab_size=256,  # bytes
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=2,
    num_attention_heads=4,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)

torch.manual_seed(0)  # the same model on every process
model = LlamaForCausalLM(config)
units = fullshard.shard_blocks(model)  # finds the decoder layers
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

rank, device = dist.get_rank(), next(model.parameters()).device
torch.manual_seed(1 + rank)  # other data on every process
text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
if rank == 0:
    print(units)

for step in range(1, STEPS + 1):
    windows = text[torch.randint(len(text) - TIME, (BATCH, 1)) + torch.arange(TIME)].to(device)
    loss = model(input_ids=windows, labels=windows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step == 1 or step % 20 == 0):
        print(f"step {step} loss {loss.item():.3f}")

# Every process must run the same forwards, so all of them sample the same text.
model.eval()
prompt = torch.tensor([list(b"import ")], device=device)
with torch.no_grad():
    sample = model.generate(prompt, max_new_tokens=40, do_sample=False)
if rank == 0:
    print("sample", bytes(sample[0].tolist()))

dist.destroy_process_group()
