"""The units that ``shard_blocks`` chooses, and its refusals, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.errors import ConfigError
from fullshard.frontend.blocks import Why, choose
from fullshard.frontend.ownership import units_below

pytestmark = pytest.mark.usefixtures("world_of_one")


class Layer(nn.Module):
    """A block with a list of its own."""

    def __init__(self, dim: int, experts: int = 2) -> None:
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Decoder(nn.Module):
    def __init__(self, dim: int = 8, vocab: int = 100, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList([Layer(dim), Layer(dim), Layer(dim, 3)])
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def names(model: nn.Module, ignored: set[nn.Parameter] | None = None) -> list[str]:
    return [unit.name for unit in choose(model, ignored or set())]


def test_layers_large_ends_and_the_rest() -> None:
    assert names(Decoder()) == ["layers.0", "layers.1", "layers.2", "embed", "head", ""]


def test_small_ends_stay_with_the_model() -> None:
    assert names(Decoder(vocab=4)) == ["layers.0", "layers.1", "layers.2", ""]


def test_tied_ends_stay_with_the_model() -> None:
    assert names(Decoder(tied=True)) == ["layers.0", "layers.1", "layers.2", ""]


def test_a_block_tied_to_another_stays_with_the_model_one_tied_in_itself_does_not() -> None:
    model = Decoder()
    model.layers[0].up.weight = model.layers[1].up.weight
    model.layers[2].experts[0].weight = model.layers[2].experts[1].weight
    assert names(model) == ["layers.2", "embed", "head", ""]


def test_one_module_in_two_places_is_one_block() -> None:
    model = nn.Sequential(*[Layer(4)] * 2, Layer(4))
    assert names(model) == ["0", "2", ""]


def test_what_is_ignored_does_not_count() -> None:
    model = Decoder()
    ignored = {*model.layers[0].parameters(), model.embed.weight}
    assert names(model, ignored) == ["layers.1", "layers.2", "head", ""]


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"encoder": Decoder(vocab=2), "decoder": Decoder(vocab=2)})

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Linear(4, 4), [""]),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), ["0", "2", ""]),
        (lambda: nn.Sequential(nn.Embedding(9, 8), Layer(8), Layer(8)), ["1", "2", ""]),
        (
            lambda: nn.Transformer(8, 2, 2, 1, 16, batch_first=True),
            ["encoder.layers.0", "encoder.layers.1", ""],
        ),
        (
            lambda: nn.ModuleList([nn.ModuleList([Layer(4), Layer(4)]), Layer(4)]),
            ["0.0", "0.1", "1", ""],
        ),
        (lambda: nn.MultiheadAttention(8, 2), [""]),
        (EncoderDecoder, ["parts.encoder", "parts.decoder", ""]),
    ],
    ids=["leaf", "mlp", "sequential", "transformer", "nested", "attention", "encoder_decoder"],
)
def test_models_of_other_shapes(make: Callable[[], nn.Module], expected: list[str]) -> None:
    with torch.device("meta"):
        assert names(make()) == expected


def test_the_numbers_of_elements_add_up() -> None:
    model = Decoder()
    chosen = choose(model, set())
    assert sum(unit.numel for unit in chosen) == sum(p.numel() for p in model.parameters())


def test_equal_neighbours_print_as_one_line() -> None:
    printed = str(choose(Decoder(), set())).splitlines()
    assert [" ".join(line.split()) for line in printed] == [
        "layers.0 to layers.1 Layer 2 x 216 repeated block",
        "layers.2 Layer 288 repeated block",
        "embed Embedding 800 large embedding",
        "head Linear 800 large linear layer outside of the blocks",
        "(root) Decoder 16 everything else",
    ]


class TwoLists(nn.Module):
    """Two lists of blocks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.encoder, *self.decoder):
            x = layer(x)
        return x


def test_neighbouring_blocks_of_one_list_form_a_unit() -> None:
    model = TwoLists()
    chosen = fullshard.shard_blocks(model, plan=fullshard.Choice(blocks_per_unit=2))
    expected = [
        ("encoder.0 to encoder.1", 40), ("encoder.2", 20),
        ("decoder.0 to decoder.1", 40), ("decoder.2 to decoder.3", 40), ("decoder.4", 20),
    ]  # fmt: skip
    assert [(unit.name, unit.numel) for unit in chosen] == [*expected, ("", 0)]
    names = {unit.name for unit in units_below([model])}
    assert names == {name for name, _ in expected} | {""}  # engines have the same names
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_every_unit_is_sharded_and_trains() -> None:
    model = Decoder()
    chosen = fullshard.shard_blocks(model)
    assert isinstance(model, fullshard.FSDPModule)
    for unit in chosen:
        assert isinstance(model.get_submodule(unit.name), fullshard.FSDPModule), unit
    model(torch.arange(4)).sum().backward()
    assert model.head.weight.grad is not None


def scalar(model: Any) -> dict[str, Any]:
    model.layers[2].scale = nn.Parameter(torch.tensor(1.0))
    return {}


def sharded_before(model: Any) -> dict[str, Any]:
    fullshard.fully_shard(model.layers[2])
    return {}


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (scalar, ConfigError, "layers.2.scale is a scalar"),
        (sharded_before, ConfigError, "given to fully_shard before"),
        (
            lambda model: {"reshard_after_forward": "yes"},
            ConfigError,
            "expected None, a bool or an int",
        ),
        (lambda model: {"mesh": 3}, TypeError, "expected a DeviceMesh"),
        (lambda model: {"meshes": 3}, TypeError, "meshes"),
    ],
    ids=["scalar", "sharded_before", "reshard", "mesh", "unknown"],
)
def test_what_is_refused_changes_nothing(
    spoil: Callable[[Any], dict[str, Any]], error: type[Exception], text: str
) -> None:
    model = Decoder()
    options = spoil(model)
    before = [type(module) for module in model.modules()]
    with pytest.raises(error, match=text):
        fullshard.shard_blocks(model, **options)
    assert [type(module) for module in model.modules()] == before


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="got int, expected"):
        fullshard.shard_blocks(3)  # type: ignore[arg-type]


class Stage(nn.Module):
    """Blocks of one width, and a layer that changes the width."""

    def __init__(self, dim: int, depth: int, kind: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.down = nn.Linear(dim // 2, dim)
        self.blocks = nn.ModuleList(kind(dim) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Expert(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x


def lists(*widths: list[int]) -> nn.Module:
    return nn.ModuleList(nn.ModuleList(map(Layer, own)) for own in widths)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: lists([8, 8], [8, 8]), ["0.0", "0.1", "1.0", "1.1", ""]),
        (lambda: lists([8], [8]), ["0.0", "1.0", ""]),
        (lambda: nn.ModuleList([lists([8], [4]), lists([2])]), ["0.0.0", "0.1.0", "1.0.0", ""]),
        (
            lambda: nn.ModuleList([Stage(8, 2), Stage(16, 1)]),
            ["0.blocks.0", "0.blocks.1", "1.blocks.0", ""],
        ),
        (
            lambda: nn.Sequential(
                nn.Sequential(Layer(8), Layer(8)), nn.Sequential(Layer(4), Layer(4))
            ),
            ["0.0", "0.1", "1.0", "1.1", ""],
        ),
        # a sequence of blocks between two layers, in a list and in a module of its own
        (
            lambda: nn.Sequential(
                nn.Linear(4, 8), nn.Sequential(Layer(8), Layer(8)), nn.Linear(8, 4)
            ),
            ["1.0", "1.1", ""],
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 8), Decoder(vocab=2), nn.Linear(8, 90)),
            ["1.layers.0", "1.layers.1", "1.layers.2", "2", ""],
        ),
        (
            lambda: nn.Sequential(Expert(8), nn.Sequential(Layer(8), Layer(8)), Expert(8)),
            ["0", "1.0", "1.1", "2", ""],
        ),
        # units as without lists of lists: layers with experts, one width, a small net between
        # layers
        (
            lambda: nn.Sequential(
                Layer(8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Layer(8)
            ),
            ["0", "1", "2", ""],
        ),
        (lambda: nn.ModuleList([Layer(8), Layer(8), Stage(8, 4, Expert)]), ["0", "1", "2", ""]),
        (lambda: nn.ModuleList([Stage(8, 4, Expert), Stage(8, 4, Expert)]), ["0", "1", ""]),
        (lambda: nn.ModuleList([Stage(8, 2), Stage(8, 3)]), ["0", "1", ""]),
    ],
    ids=[
        *("lists", "of_one", "deep", "stages", "sequential", "body", "model", "between_blocks"),
        *("small_net", "odd_one", "experts", "alike"),
    ],
)
def test_lists_of_lists(make: Callable[[], nn.Module], expected: list[str]) -> None:
    assert [name for name in names(make()) if "down" not in name] == expected


@pytest.mark.parametrize("name", ["ConvNext", "Swin", "ResNet", "ResNet-basic"])
def test_blocks_of_the_stages_of_vision_models(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    options: dict[str, Any] = {
        "ConvNext": {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 2, 3, 1]},
        "Swin": {"image_size": 32, "embed_dim": 8, "depths": [2, 2, 3], "num_heads": [1, 2, 4]},
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [1, 2, 2]},
        "ResNet-basic": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]},
    }[name]
    name, _, kind = name.partition("-")
    options |= {"layer_type": kind} if kind else {}
    config = getattr(transformers, f"{name}Config")(**options)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}Model")(config)
    inner = {"ConvNext": "stages.{}.layers.{}", "ResNet": "stages.{}.layers.{}"}
    path = f"encoder.{inner.get(name, 'layers.{}.blocks.{}')}"
    blocks = [unit.name for unit in choose(model, set()) if unit.why is Why.BLOCK]
    assert blocks == [
        path.format(stage, block)
        for stage, depth in enumerate(options["depths"])
        for block in range(depth)
    ]
