"""Sharding, which changes a model's class, keeps the name conversions of transformers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard
from fullshard.checkpoint.weights.names import InFile, choose, stored_tensors
from fullshard.errors import UnsupportedError

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

pytestmark = [
    pytest.mark.usefixtures("world_of_one"),
    pytest.mark.filterwarnings("ignore"),  # warnings of transformers
]

FUSED = {
    "Molmo2TextModel", "NemotronH_Omni_Reasoning_V3", "RfDetrForInstanceSegmentation",
    "RfDetrForObjectDetection", "RfDetrModel", "Tipsv2DptForDepthEstimation",
    "Tipsv2DptForNormalEstimation", "Tipsv2DptForSemanticSegmentation", "Tipsv2TextModel",
    "Tipsv2VisionBackbone", "Tipsv2VisionModel", "UnlimitedOcrVisionEncoder",
}  # fmt: skip
"""Classes for which transformers stores several parameters as one tensor."""

NO_DEFAULT = {
    "AyaVisionModel", "ConditionalDetrForSegmentation", "ConditionalDetrModel",
    "DetrForSegmentation", "DetrModel", "Emu3Model",
    "Sapiens2ForImageMatting", "Sapiens2ForNormalEstimation", "Sapiens2ForPointmapEstimation",
    "Sapiens2ForPoseEstimation", "Sapiens2ForSemanticSegmentation",
}  # fmt: skip
"""Classes that cannot be built from their default configuration, or only with timm."""

OPTIONS: dict[str, Any] = {"BeitForSemanticSegmentation": {"out_indices": [3, 5, 7, 11]}}


def classes() -> Iterator[type[Any]]:
    """Yield the classes for which transformers converts names by class name."""
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("")  # fills the cache read below
    table = conversion_mapping._checkpoint_conversion_mapping_cache
    folder = Path(transformers.__file__).parent
    files = {file: file.read_text() for file in folder.glob("models/*/modeling_*.py")}
    for name in table:
        for file, text in files.items():
            if re.search(rf"^class {name}\(", text, re.MULTILINE):
                dots = ".".join(file.relative_to(folder).with_suffix("").parts)
                yield getattr(importlib.import_module(f"transformers.{dots}"), name)


def outcome(cls: type[Any]) -> str:
    """Compare the names and shapes that are written and read with those of transformers."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        config = cls.config_class(**OPTIONS.get(cls.__name__, {}))
        with torch.device("meta"):
            model = cls(config)
    except (AttributeError, ImportError, TypeError, ValueError):
        return "not made"
    state = model.state_dict(keep_vars=True)
    shapes = {name: tuple(each.shape) for name, each in state.items()}
    with torch.no_grad():
        files = revert_weight_conversion(model, dict(model.state_dict()))
    right = {name: tuple(each.shape) for name, each in files.items()}
    for module in reversed(list(model.modules())):
        if isinstance(module, transformers.PreTrainedModel):
            fullshard.fully_shard(module)
    assert type(model).__name__ != cls.__name__
    try:
        found = {one.name: one.shape for one in stored_tensors(model, shapes)}
    except UnsupportedError as error:
        return "fused" if "is no box of a parameter" in str(error) else str(error)
    if found != right:
        return f"writes {sorted(found.items() ^ right.items())[:4]}"
    tied: dict[int, list[str]] = {}
    for name, each in state.items():
        tied.setdefault(id(each), []).append(name)
    infos = {name: InFile("", "F32", shape) for name, shape in right.items()}
    chosen = choose(model, list(tied.values()), shapes, infos)
    lost = [*chosen.missing, *chosen.unexpected]
    return f"reads without {lost[:4]}" if lost else "equal"


def test_all_sharded_classes_keep_their_names() -> None:
    found = {cls.__name__: outcome(cls) for cls in classes()}
    others = {name: what for name, what in found.items() if what != "equal"}
    fused = {name for name, what in others.items() if what == "fused"}
    not_made = {name for name, what in others.items() if what == "not made"}
    assert set(others) == fused | not_made, others
    assert (fused, not_made) == (FUSED, NO_DEFAULT)
    assert (len(found), len(others)) == (101, 23)
