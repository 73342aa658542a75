"""The rule that tells which parameters of a model Muon steps, and which AdamW."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fullshard._torch import nn as _nn
from fullshard.comm.text import listed, table
from fullshard.errors import ConfigError
from fullshard.optim.muon.full import not_a_matrix
from fullshard.optim.owned import placement_of
from fullshard.tensors.form import clean_name

MUON, ADAMW = "muon", "adamw"
_DEFAULT = "two dims or more"


@dataclass(frozen=True, eq=False)
class ParamInfo:
    """Facts about a parameter, beside its name, for a rule.

    Attributes:
        param: the parameter; of a sharded model, a rank's part of it.
        shape: of the full parameter.
        names: all names of the parameter, of which a tied one has several.
        modules: the modules that have it, one for each name.
        vocabularies: the numbers of rows of all embeddings of the model.
        head: the linear layer that ends an ``nn.Sequential`` and the model, if it is a head.
    """

    param: nn.Parameter
    shape: tuple[int, ...]
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    vocabularies: frozenset[int]
    head: nn.Module | None = None


Answer = str | Mapping[str, Any] | None
"""``"muon"`` or ``"adamw"``; None leaves the choice to the default rule. Or a mapping with one of
these under ``"algorithm"``, perhaps ``"blocks"``, and options of the parameter's group. Blocks are
the matrices of a parameter: how many of equal height, their heights, or ``"each"`` for one at each
index of the first dim, the default for parameters of three dims that are no convolution's."""

Blocks = str | tuple[int, ...] | None

Rule = Callable[[str, ParamInfo], Answer]


@dataclass(frozen=True, eq=False)
class ParamChoice:
    """The choice for one parameter.

    Attributes:
        names: of the parameter; a tied one has several.
        shape: of the full parameter.
        algorithm: ``"muon"`` or ``"adamw"``.
        why: the reason, in words.
        blocks: the parts that are stepped as parameters of their own: ``"each"`` index of the first
            dim, or so many rows each; None if there is only one.
        stacked: how many leading dims of such a part count matrices.
        options: of the parameter's group, where they differ from those given for all.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    algorithm: str
    why: str
    blocks: Blocks = None
    stacked: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


class Choices(tuple[ParamChoice, ...]):
    """The choices for all parameters of a model, in its order; printed, they are a table."""

    def __str__(self) -> str:
        head = ("parameter", "shape", "stepped by", "because")
        return "\n".join([*table(head, [*map(_row, self)], right=False), self._sums()])

    def _sums(self) -> str:
        sums = {MUON: 0, ADAMW: 0}
        for one in self:
            sums[one.algorithm] += math.prod(one.shape)
        return f"elements: {sums[MUON]:,} by muon, {sums[ADAMW]:,} by adamw"


def choose(
    model: nn.Module, rule: Rule | Mapping[str, Answer] | None
) -> Iterator[tuple[nn.Parameter, ParamChoice]]:
    """Yield the parameters of ``model``, in its order, each with the choice of ``rule``.

    Args:
        model: sharded or not.
        rule: a function; or answers by pattern, such as ``"*.router.weight"``, of which the first
            that fits one of a parameter's names counts. None calls ``default_rule``.

    Raises:
        ConfigError: an answer is not one, or a pattern fits no parameter.
        UnsupportedError: Muon was chosen for a parameter that is no matrix.
    """
    infos = list(_infos(model))
    asked = _by_pattern(rule, infos) if isinstance(rule, Mapping) else rule
    for info in infos:
        yield info.param, _choice(info, asked)


def default_rule(name: str, info: ParamInfo) -> tuple[str, str]:
    """Return ``"muon"`` or ``"adamw"`` for a parameter, and why.

    AdamW steps everything with less than two dims, norms, embeddings, and heads. A linear layer is
    a head by its name, if it is as wide as an embedding has rows, or if it ends the model in an
    ``nn.Sequential``. In other numbered blocks, only the name ``lm_head`` makes a head.
    """
    if len(info.shape) < 2:
        return ADAMW, "fewer than 2 dims"
    if info.param.is_complex() or not info.param.is_floating_point():
        return ADAMW, f"{info.param.dtype}".removeprefix("torch.")
    for own, module in zip(info.names, info.modules, strict=True):
        why = _why_adamw(own, module, info)
        if why is not None:
            return ADAMW, why
    return MUON, _DEFAULT


def warn_without_ends(choices: Choices) -> None:
    """Warn if matrices go to Muon by default and AdamW steps no matrix at all."""
    names = [one.names[0] for one in choices if one.why == _DEFAULT]
    if names and not any(len(one.shape) > 1 and one.algorithm == ADAMW for one in choices):
        warnings.warn(
            f"Muon found no head and no embedding, so it steps {listed(names)}. AdamW suits the "
            f'first and the last layer better: give rule={{"{names[-1]}": "adamw"}} for such a '
            'layer. To keep the others without this warning, give rule={"NAME": "muon"} for each',
            stacklevel=3,
        )


def _infos(model: nn.Module) -> Iterator[ParamInfo]:
    places: dict[int, list[tuple[str, nn.Module]]] = {}
    params: dict[int, nn.Parameter] = {}
    vocabularies = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            vocabularies.add(module.num_embeddings)
        for own, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name = clean_name(f"{path}.{own}" if path else own)
            params[id(param)] = param
            places.setdefault(id(param), []).append((name, module))
    head = _last_of_sequential(model)
    for key, param in params.items():
        names, modules = zip(*places[key], strict=True)
        placed = placement_of(param, f"Muon: parameter {names[0]!r}")
        shape = tuple(param.shape) if placed is None else placed[0].shape
        yield ParamInfo(param, shape, names, modules, frozenset(vocabularies), head)


def _last_of_sequential(model: nn.Module) -> nn.Module | None:
    """Return the linear layer that ends an ``nn.Sequential`` and the model, if it is a head.

    The layer is a head if its output is not as wide as the input of the member of the
    ``nn.Sequential`` that it is in. A block ends as wide as it begins, so its last layer is none.
    """
    path, last = "", model
    for name, module in model.named_modules(remove_duplicate=False):
        if any(param is not None for param in module._parameters.values()):
            path, last = name, module
    outer = member = model
    for part in path.split("."):
        outer, member = member, member.get_submodule(part)
        if isinstance(outer, nn.Sequential) or part.isdigit():
            break
    if not isinstance(outer, nn.Sequential) or not isinstance(last, nn.Linear):
        return None
    first = next(one for one in member.modules() if isinstance(one, nn.Linear))
    return last if last.out_features != first.in_features else None


def _choice(info: ParamInfo, rule: Rule | None) -> ParamChoice:
    name = info.names[0]
    answer = None if rule is None else rule(name, info)
    options = dict(answer) if isinstance(answer, Mapping) else {"algorithm": answer}
    algorithm, blocks = options.pop("algorithm", None), options.pop("blocks", None)
    why = "the rule given"
    if algorithm is None:
        algorithm, why = default_rule(name, info)
    if algorithm not in (MUON, ADAMW):
        raise ConfigError(
            f"Muon: the rule says {answer!r} of parameter {name!r}; expected 'muon' or 'adamw', "
            "None for the default, or a mapping of options"
        )
    if algorithm == ADAMW:
        return ParamChoice(info.names, info.shape, algorithm, why, options=options)
    if len(info.shape) < 2 or not info.param.is_floating_point():
        raise not_a_matrix(f"parameter {name!r}", info.shape, 0, info.param.dtype)
    blocks, stacked = _matrices(info, blocks)
    return ParamChoice(info.names, info.shape, algorithm, why, blocks, stacked, options)


def _matrices(info: ParamInfo, wanted: Any) -> tuple[Blocks, int]:
    """Return the blocks of a parameter, and how many leading dims of each count matrices.

    Raises:
        ConfigError: the parameter has no such blocks.
    """
    is_conv = any(isinstance(module, _nn.ConvNd) for module in info.modules)
    leading = 0 if is_conv else len(info.shape) - 2
    height = info.shape[0]
    blocks: Blocks = "each" if wanted == "each" or (wanted is None and leading) else None
    if isinstance(wanted, int) and wanted > 0 and height % wanted == 0:
        blocks = (height // wanted,) * wanted
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str) and sum(wanted) == height:
        blocks = tuple(wanted)
    elif wanted not in (None, "each") or (wanted == "each" and len(info.shape) < 3):
        raise ConfigError(
            f"Muon: the rule says blocks={wanted!r} of parameter {info.names[0]!r} of shape "
            f"{info.shape}; expected a number that divides {height}, heights that add up to "
            f'{height}, or, with more than two dims, "each"'
        )
    return blocks, max(0, leading - 1) if blocks == "each" else leading


def _by_pattern(rule: Mapping[str, Answer], infos: Sequence[ParamInfo]) -> Rule:
    for pattern in rule:
        if not any(fnmatchcase(name, pattern) for info in infos for name in info.names):
            raise ConfigError(
                f"Muon: the pattern {pattern!r} of the rule fits no parameter; names are such as "
                f"{', '.join(info.names[0] for info in infos[:4])}"
            )

    def answer(_: str, info: ParamInfo) -> Answer:
        fits = (
            own
            for pattern, own in rule.items()
            if any(fnmatchcase(name, pattern) for name in info.names)
        )
        return next(fits, None)

    return answer


_LM_HEADS = {"lm_head", "unembed", "unembedding", "embed_out"}
_HEADS = _LM_HEADS | {"head", "output", "output_layer", "classifier", "score", "logits"}


def _why_adamw(name: str, module: nn.Module, info: ParamInfo) -> str | None:
    """Return why AdamW steps a parameter of two or more dims; None if it does not."""
    kind, (*path, own) = type(module).__name__, name.split(".")
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or kind.endswith("Embedding"):
        return "an embedding"
    if "embed" in own or own.endswith("_token") or own in ("wte", "wpe"):
        return "an embedding by its name"
    if "norm" in kind.lower():
        return "of a norm"
    if own.endswith("bias"):
        return "a bias"
    last = path[-1] if path else ""
    if module is info.head:
        return "a head, the last layer of a Sequential"
    in_blocks = any(part.isdigit() for part in path)
    if last in (_LM_HEADS if in_blocks else _HEADS):
        return f"a head by its name, {last}"
    is_last = isinstance(module, nn.Linear) and not in_blocks
    if is_last and info.shape[0] in info.vocabularies:
        return f"a head, as wide as an embedding has rows, {info.shape[0]:,}"
    return None


def _row(choice: ParamChoice) -> tuple[str, str, str, str]:
    names = choice.names
    cut = {} if choice.blocks is None else {"blocks": choice.blocks}
    options = "".join(f", {key}={value!r}" for key, value in {**cut, **choice.options}.items())
    tied = f" (= {', '.join(names[1:])})" if len(names) > 1 else ""
    shape = " x ".join(map(str, choice.shape)) or "()"
    return names[0] + tied, shape, choice.algorithm, choice.why + options
