"""Architectures of transformers: each trains in shards as it does in one process.

A small model of each architecture is saved by transformers, loaded into shards from the meta
device, trained, exported, and loaded by transformers again. The same model without fullshard is the
reference. The results are a table in ``docs/frameworks.md``.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import fullshard
from fullshard import checkpoint
from fullshard.errors import ConfigError
from tests.frameworks.matrix import PAGE, TIMEOUT_S, parts
from tests.ranks.pool import RankPool

BEGIN, END = "<!-- architectures -->\n", "<!-- end of architectures -->\n"
HEAD = (
    "| architecture | class | shows | trained in shards | exported and reloaded | chats |\n"
    "|---|---|---|---|---|---|\n"
)
WORLD, STEPS, BATCH, LENGTH, LONGEST = 2, 2, 4, 12, 64

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": LONGEST,
}  # fmt: skip
MARKS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {**SIZES, **MARKS, "num_key_value_heads": 2}
GEMMA = {**DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGES = {"image_size": 8, "patch_size": 4}
TRANSLATOR = {
    **MARKS, "vocab_size": 300, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "decoder_start_token_id": 1,
}  # fmt: skip


def tokens(first: int) -> Tensor:
    """Return token ids other than those of padding and of the begin and end marks."""
    return 3 + (torch.arange(BATCH * LENGTH) * 7 + first).view(BATCH, LENGTH) % 297


def noise(*shape: int) -> Tensor:
    return torch.sin(torch.arange(BATCH * torch.Size(shape).numel()) * 1.7).view(BATCH, *shape)


def text() -> dict[str, Tensor]:
    return {"input_ids": tokens(0)}


def translation() -> dict[str, Tensor]:
    return {"input_ids": tokens(0), "decoder_input_ids": tokens(5)}


def speech() -> dict[str, Tensor]:
    return {"input_features": noise(8, 2 * LENGTH), "decoder_input_ids": tokens(0)}


def images() -> dict[str, Tensor]:
    return {"pixel_values": noise(3, 8, 8)}


def large_images() -> dict[str, Tensor]:
    return {"pixel_values": noise(3, 32, 32)}


def captions() -> dict[str, Tensor]:
    return {"input_ids": tokens(0).index_fill(1, torch.tensor(LENGTH - 1), 2), **images()}


IN_FP64 = {"dtype": torch.float64, "experts_implementation": "eager"}
"""PyTorch's grouped products, the default for experts, lack fp64; chats run with them."""


class Architecture(NamedTuple):
    """An architecture of transformers, a small model of it, and batches for the model."""

    name: str
    """The ``model_type`` of transformers."""
    auto: str
    """The suffix of the transformers class ``AutoModel...`` that builds it."""
    shows: str
    config: dict[str, Any]
    batch: Callable[[], dict[str, Tensor]] = text
    mixes_samples: bool = False
    """Samples of a batch depend on each other, so each rank reads the whole batch."""
    has_scalars: bool = False
    """Has a scalar parameter, which needs the layout ``Ragged()``."""
    chats: str = "equal"
    """The expected result of two steps of the trainer on chats, for causal language models."""

    @property
    def is_causal(self) -> bool:
        """True if the trainer can fine-tune it on chats."""
        return self.auto == CAUSAL


NOT_PACKED = "equal, with `--no-pack`"

CAUSAL, MASKED, SEQ2SEQ = "ForCausalLM", "ForMaskedLM", "ForSeq2SeqLM"

ARCHITECTURES = [
    Architecture("llama", CAUSAL, "grouped queries", DECODER),
    Architecture("qwen2", CAUSAL, "tied head", {**DECODER, "tie_word_embeddings": True}),
    Architecture("qwen3", CAUSAL, "norms of queries and keys", {**DECODER, "head_dim": 8}),
    Architecture("qwen3_moe", CAUSAL, "experts, fused in memory", {
        **DECODER, **EXPERTS, "head_dim": 8, "num_experts": 4, "norm_topk_prob": True,
    }),
    Architecture("mistral", CAUSAL, "sliding window", {**DECODER, "sliding_window": 8}),
    Architecture("mixtral", CAUSAL, "experts, renamed", {**DECODER, "num_local_experts": 4}),
    Architecture("gemma2", CAUSAL, "capped logits, tied head", GEMMA),
    Architecture("gemma3_text", CAUSAL, "two rotary tables, scaled embedding", {
        **GEMMA, "layer_types": ["sliding_attention", "full_attention"],
    }),
    Architecture("phi3", CAUSAL, "fused projections", DECODER),
    Architecture("gpt2", CAUSAL, "transposed weights, tied head", {
        "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
    Architecture("gpt_neox", CAUSAL, "names that depend on the class", {
        **SIZES, **MARKS, "rotary_pct": 0.5,
    }),
    Architecture("gpt_oss", CAUSAL, "sinks, experts with biases", {
        **DECODER, "num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 8,
        "sliding_window": 8,
    }, chats=NOT_PACKED),
    Architecture("deepseek_v3", CAUSAL,
                 "latent attention, shared and routed experts, a dense block", {
        **DECODER, **EXPERTS, "num_hidden_layers": 3, "n_routed_experts": 4, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 16,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_mtp_layers": 0,
        "num_key_value_heads": 4,
    }),
    Architecture("olmo2", CAUSAL, "norms behind the layers", DECODER),
    Architecture("falcon_h1", CAUSAL, "attention beside a state space", {
        **DECODER, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    }, chats=NOT_PACKED),
    Architecture("mamba", CAUSAL, "state space, tied head, no positions", {
        "vocab_size": 300, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, **MARKS,
    }),
    Architecture("bert", MASKED, "encoder, tied head and bias", {**BERT, "pad_token_id": 0}),
    Architecture("roberta", MASKED, "positions that follow the padding", {
        **BERT, "pad_token_id": 1,
    }),
    Architecture("t5", SEQ2SEQ, "one embedding at four places, shared bias of positions", {
        **MARKS, "vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
        "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 1,
    }, translation),
    Architecture("marian", SEQ2SEQ, "frozen sinusoids that are not saved", {
        **TRANSLATOR, "max_position_embeddings": LONGEST, "dropout": 0.0, "pad_token_id": 299,
    }, translation),
    Architecture("whisper", "ForSpeechSeq2Seq", "convolutions, frozen sinusoids, tied head", {
        **TRANSLATOR, "num_mel_bins": 8, "max_source_positions": LENGTH,
        "max_target_positions": LONGEST, "begin_suppress_tokens": [1, 2],
    }, speech),
    Architecture("vit", "ForImageClassification", "patches, a parameter as first token", {
        **SIZES, **IMAGES, "num_labels": 5,
    }, images),
    Architecture("resnet", "ForImageClassification", "batch norms with counters", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic",
        "num_labels": 5,
    }, large_images, mixes_samples=True),
    Architecture("clip", "", "two towers, a scalar parameter, so `Ragged()` alone", {
        "text_config": {**SIZES, **MARKS, "projection_dim": 16},
        "vision_config": {**SIZES, **IMAGES, "projection_dim": 16}, "projection_dim": 16,
    }, captions, mixes_samples=True, has_scalars=True),
]  # fmt: skip


class Result(NamedTuple):
    """The results of an architecture: each is "equal", or a description of the difference."""

    trained: str
    exported: str
    chats: str


def family(one: Architecture) -> Any:
    """Return the class of transformers that builds and loads the model."""
    import transformers

    return getattr(transformers, f"AutoModel{one.auto}")


def built(one: Architecture) -> Any:
    """Return a new model in fp64."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(one.name, **copy.deepcopy(one.config))
    return family(one).from_config(config, **IN_FP64)


def written(one: Architecture, folder: Path) -> Path:
    """Save a model by transformers, with all weights moved from their initial values."""
    torch.manual_seed(7)
    model = built(one)
    for param in model.parameters():
        if param.requires_grad:
            param.data += torch.linspace(-0.01, 0.01, param.numel()).view_as(param)
    path = folder / one.name
    model.save_pretrained(path)
    return path


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = logits_of(model, batch)
    targets = batch[next(iter(batch))].flatten(1).sum(1).long() % 5
    if logits.dim() == 3:
        targets = batch["decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"] % 50
    elif "input_ids" in batch:
        targets = torch.arange(len(logits))  # each caption belongs to the image at its place
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    found: Tensor = output["logits_per_image" if "logits_per_image" in output else "logits"]
    return found.double()


def steps(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Train for ``STEPS`` steps on one batch; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        losses.append(loss_of(model, batch))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


def apart(found: dict[str, Tensor], expected: dict[str, Tensor], most: float) -> str:
    """Describe the first tensor that differs by more than ``most``; "" if all are equal."""
    if found.keys() != expected.keys():
        return f"names {sorted(found.keys() ^ expected.keys())[:4]}"
    for name, value in expected.items():
        own = found[name]
        if own.shape != value.shape or own.dtype != value.dtype:
            return f"{name} is {own.dtype} {tuple(own.shape)}, not {value.dtype} {value.shape}"
        if value.numel() and not (own.double() - value.double()).abs().max() <= most:
            return f"{name} by {(own.double() - value.double()).abs().max():.1e}"
    return ""


TOLERANCE = 1e-6
"""Largest difference of fp64 weights: models compute norms and rotary embeddings in fp32."""


LAYOUTS = {"per-parameter": fullshard.PerParameter(), "ragged": fullshard.Ragged()}


def trained_and_exported(one: Architecture, folder: Path, layout: str) -> tuple[str, str]:
    """On a rank: train in shards and in one process, export both, and compare."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = built(one).train()
    fullshard.shard_blocks(model, layout=LAYOUTS[layout])
    loaded = checkpoint.load_weights(model, folder)
    if loaded != ([], []):
        return f"not loaded: {loaded}", "not run"
    theirs = family(one).from_pretrained(folder, **IN_FP64).train()
    for param, own in zip(theirs.parameters(), built(one).parameters(), strict=True):
        param.requires_grad_(own.requires_grad)  # from_pretrained unfreezes all
    buffers, of_theirs = (dict(own.named_buffers()) for own in (model, theirs))
    said = apart(buffers, of_theirs, 0)
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    whole = one.batch()
    whole = {n: v.double() if v.is_floating_point() else v for n, v in whole.items()}
    share = slice(BATCH) if one.mixes_samples else slice(rank, None, world)
    losses = torch.stack(steps(model, {name: value[share] for name, value in whole.items()}))
    dist.all_reduce(losses)
    expected = torch.stack(steps(theirs, whole))
    if not said and not torch.allclose(losses / world, expected, rtol=0, atol=TOLERANCE):
        said = f"losses {(losses / world).tolist()}, not {expected.tolist()}"
    full = checkpoint.full_state_dict(model, rank0_only=False)
    said = said or apart(full, theirs.state_dict(), TOLERANCE)
    if not said and apart(before, full, 1e-4) == "":
        said = "no weight moved"
    return said or "equal", exported(one, model, theirs, folder.parent / layout, whole)


def exported(
    one: Architecture, model: Any, theirs: Any, folder: Path, batch: dict[str, Tensor]
) -> str:
    """On a rank: export a trained model; compare the files with those that transformers writes."""
    ours, other = folder.with_suffix(".ours"), folder.with_suffix(".theirs")
    checkpoint.save_weights(model, ours)
    with torch.no_grad():
        logits = logits_of(model.eval(), batch)
    if dist.get_rank() != 0:
        return "equal"
    theirs.save_pretrained(other)
    said = apart(files_in(ours), files_in(other), TOLERANCE)
    if said:
        return said
    for name in ("config.json", "generation_config.json"):
        texts = [(own / name).read_text() for own in (ours, other) if (own / name).exists()]
        if [json.loads(text) for text in texts[1:]] != [json.loads(text) for text in texts[:1]]:
            return f"{name} differs"
    again, info = family(one).from_pretrained(ours, **IN_FP64, output_loading_info=True)
    if any(info.values()):
        return f"reloaded with {info}"
    with torch.no_grad():
        found = logits_of(again.eval(), batch)
    return "equal" if torch.equal(found, logits) else f"logits by {(found - logits).abs().max()}"


def files_in(folder: Path) -> dict[str, Tensor]:
    return {n: v for file in folder.glob("*.safetensors") for n, v in load_file(file).items()}


def chatted(config: Any) -> list[float] | str:
    """On a rank: return the losses of the trainer on chats, or the text of its refusal."""
    from tests.kit.train_tuning import tuned

    try:
        return tuned(config, config.steps, None)[0]
    except ConfigError as error:
        return str(error)


def chats_of(one: Architecture, path: Path, pool: RankPool) -> str:
    """Train on packed chats, and compare with one process that reads each chat alone."""
    from tests.kit.train_chats import write_chats, write_tokenizer
    from tests.kit.train_tuning import alone, config_of, expected_losses, text_of

    write_tokenizer(path)
    write_chats(path.parent / "chats.jsonl", 60)
    config = config_of(path.parent, one.name, steps=2, seq=LONGEST)
    rows: Any = text_of(config).train.rows(LONGEST)
    assert rows.alone or len(rows) < 50  # some rows have several chats
    found = pool.run(WORLD, chatted, config, timeout_s=TIMEOUT_S)[0]
    added = ""
    if isinstance(found, str) and "Give --no-pack" in found:
        added, config = ", with `--no-pack`", replace(config, pack=False)
        found = pool.run(WORLD, chatted, config, timeout_s=TIMEOUT_S)[0]
    if isinstance(found, str):
        return f"refused: {found}"
    expected = expected_losses(config, alone(config), WORLD)
    far = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    return f"equal{added}" if far <= 1e-5 else f"losses {found}, not {expected}"


def examine(one: Architecture, pool: RankPool, folder: Path) -> Result:
    """Return the results of an architecture."""
    path = written(one, folder)
    found = [
        (layout, *said)
        for layout in LAYOUTS
        if layout == "ragged" or not one.has_scalars
        for said in pool.run(WORLD, trained_and_exported, one, path, layout, timeout_s=TIMEOUT_S)
    ]
    trained, exports = (
        next((f"{layout}: {said[at]}" for layout, *said in found if said[at] != "equal"), "equal")
        for at in (0, 1)
    )
    return Result(trained, exports, chats_of(one, path, pool) if one.is_causal else "")


# The table.


def static(one: Architecture) -> str:
    """Return the cells of a row that need no run."""
    return f"| {one.name} | {type_name(one)} | {one.shows} |"


def type_name(one: Architecture) -> str:
    """Return the class name of the model."""
    with torch.device("meta"):
        return type(built(one)).__name__


def row(one: Architecture, result: Result) -> str:
    cells = " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in result)
    return f"{static(one)} {cells} |\n"


def main(names: Sequence[str]) -> None:
    """Run the architectures whose row contains one of ``names``, or all; write their rows."""
    old = {line.split(" | ")[0]: line for line in parts(BEGIN, END)[1].splitlines(keepends=True)}
    rows = []
    with RankPool() as pool:
        for one in ARCHITECTURES:
            kept = old.get(f"| {one.name}")
            if kept is None or not names or any(name in kept for name in names):
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        result = examine(one, pool, Path(folder))
                    except Exception as error:
                        result = Result(str(error).strip().splitlines()[-1], "not run", "not run")
                    kept = row(one, result)
            print(kept, end="", flush=True)
            rows.append(kept)
    before, _, after = parts(BEGIN, END)
    PAGE.write_text(f"{before}{BEGIN}{HEAD}{''.join(rows)}{END}{after}")
