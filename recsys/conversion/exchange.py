"""Finds the replaceable modules of a model and replaces them; the Parameters stay the same."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recsys._support.torch_compat import MODULE_HOOKS
from recsys.embeddings.bag import HotColdEmbeddingBag
from recsys.embeddings.collection import HotColdEmbeddingBagCollection, HotColdEmbeddingCollection
from recsys.embeddings.embedding import HotColdEmbedding
from recsys.embeddings.tables_module import OneTable, Table, TableModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "KEPT",
    "counterpart",
    "exchange",
    "find_of_other_classes",
    "find_recsys",
    "find_replaceable",
    "give_back",
    "named_tables_in",
    "names_of",
    "require_module",
    "tables_of",
]

KEPT = "_accelerated_from"  # attribute of a recsys module: the module that it replaced


_COUNTERPARTS = {
    "EmbeddingBag": HotColdEmbeddingBag,
    "Embedding": HotColdEmbedding,
    "EmbeddingBagCollection": HotColdEmbeddingBagCollection,
    "EmbeddingCollection": HotColdEmbeddingCollection,
}


def require_module(model: object) -> None:
    """Raise TypeError unless `model` is an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")


def find_replaceable(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Find the modules that can be replaced, with their names in the model.

    Raises:
        ValueError: there is none, or the model cannot be changed.
    """
    for name, module in model.named_modules():
        place = f"module {name!r}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(  # noqa: TRY004  # its type is right, its place is wrong
                f"{place} must not be wrapped by DistributedDataParallel, which gathers gradients: "
                "rows that recsys updates leave none; accelerate in one process, or before it is "
                "wrapped and without optimizer=, so that the tables' gradients are gathered"
            )
        if KEPT in module.__dict__:
            raise ValueError(f"{place} is accelerated already; call recsys.restore(model) first")
    if _is_replaceable(model):
        raise ValueError(
            f"the model is itself an {type(model).__name__}, which cannot be replaced in place; "
            "use from_torch or from_torchrec of the class of recsys.embeddings that has the name "
            f"HotCold{type(model).__name__}"
        )
    found = names_of(model, _is_replaceable)
    if not found:
        reason = "".join(
            f"; {names[0]} is a {type(module).__name__}, a subclass unknown to recsys"
            for module, names in find_of_other_classes(model).items()
        )
        raise ValueError(
            "the model must have an nn.EmbeddingBag, an nn.Embedding or a collection of torchrec "
            f"inside, and has none{reason}"
        )
    return found


def find_recsys(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Find the user's modules of `recsys.embeddings`, with names; a model may be one itself."""
    if isinstance(model, TableModule):
        return {model: ["model"]}
    return names_of(
        model, lambda module: isinstance(module, TableModule) and KEPT not in module.__dict__
    )


def find_of_other_classes(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Find the modules with a table whose class recsys does not know."""
    return names_of(
        model,
        lambda module: (
            isinstance(module, nn.EmbeddingBag | nn.Embedding)
            and not isinstance(module, OneTable)
            and not _is_replaceable(module)
        ),
    )


def names_of(
    model: nn.Module, is_wanted: Callable[[nn.Module], bool]
) -> dict[nn.Module, list[str]]:
    """Find wanted modules, with all their names; not those inside a wanted or a recsys module."""
    found: dict[nn.Module, list[str]] = {}
    outer = "."
    for name, module in model.named_modules(remove_duplicate=False):
        if name and not f"{name}.".startswith(outer):
            if is_wanted(module):
                found.setdefault(module, []).append(name)
            if is_wanted(module) or isinstance(module, TableModule):
                outer = f"{name}."
    return found


def named_tables_in(
    found: Mapping[nn.Module, list[str]],
) -> dict[nn.Module, list[Table]]:
    """The tables of each module; a table that modules share is in the list of each."""
    tables = {module: list(tables_of(module, names[0])) for module, names in found.items()}
    # The sum of a sparse and a dense gradient is dense.
    dense = {each.weight for own in tables.values() for each in own if not each.is_sparse}
    return {
        module: [each._replace(is_sparse=each.weight not in dense) for each in own]
        for module, own in tables.items()
    }


def tables_of(module: nn.Module, name: str) -> Iterator[Table]:
    """The tables of a module; `name` is its name in the model."""
    if isinstance(module, nn.EmbeddingBag | nn.Embedding):
        yield Table(name, f"{name}.weight", "", module, module.sparse, "", name, (name,))
        return
    is_pooled = hasattr(module, "embedding_bags")
    attribute = "embedding_bags" if is_pooled else "embeddings"
    found: Any = module
    known = found.embedding_bag_configs() if is_pooled else found.embedding_configs()
    configs = {config.name: config for config in known}
    for table, bag in getattr(found, attribute).items():
        place = f"{name}.{attribute}.{table}"
        features = tuple(configs[table].feature_names)
        key, prefix = f"{place}.weight", f"{table}."
        yield Table(place, key, prefix, bag, bag.sparse, name, table, features)


def counterpart(module: nn.Module) -> TableModule:
    """A recsys module that computes the same on the same Parameters; it has no optimizer yet."""
    kind: Any = _COUNTERPARTS[type(module).__name__]
    ours: TableModule = kind._on(module)
    ours.training = module.training
    for new, old in _pairs(ours, module):
        new.__dict__.update({name: old.__dict__[name] for name in MODULE_HOOKS})
        for name, value in _attributes(old).items():
            if hasattr(type(old), name) or not hasattr(type(new), name):  # a name of our class
                new.__dict__.setdefault(name, value)
    return ours


def give_back(ours: TableModule, module: nn.Module) -> None:
    """Give the module that `ours` replaced its Parameters, and what was set on `ours` meanwhile."""
    for new, old in _pairs(ours, module):
        for name, value in _attributes(new).items():
            if name != KEPT and not hasattr(type(new), name):
                old.__dict__[name] = value


def _pairs(ours: TableModule, module: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """A module with the one that it replaces, and so the modules with the tables of both."""
    holders = zip(ours.tables(), tables_of(module, ""), strict=True)
    return [(ours, module), *((new.holder, old.holder) for new, old in holders)]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a user may have set; the private attributes of a collection are its own."""
    is_table = isinstance(module, nn.EmbeddingBag | nn.Embedding)
    return {
        name: value
        for name, value in module.__dict__.items()
        if is_table or name[:1] != "_" or name in MODULE_HOOKS
    }


def exchange(model: nn.Module, counterparts: Mapping[nn.Module, nn.Module]) -> None:
    """Replace each key by its value in the model, except inside other keys."""
    inside = {part for each in counterparts for part in each.modules()}
    for parent in list(model.modules()):
        for name, child in () if parent in inside else _children(parent):
            if child in counterparts:
                parent._modules[name] = counterparts[child]


def _is_replaceable(module: nn.Module) -> bool:
    if type(module) in (nn.EmbeddingBag, nn.Embedding):
        return True
    # Importing TorchRec takes seconds. A module of its class exists only if it is imported.
    library = sys.modules.get("torchrec.modules.embedding_modules")
    return library is not None and type(module) in (
        library.EmbeddingBagCollection,
        library.EmbeddingCollection,
    )


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children under every name; `named_children` lists a module that is used twice only once."""
    return ((name, child) for name, child in module._modules.items() if child is not None)
