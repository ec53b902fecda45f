"""Finds modules with tables that `accelerate` cannot replace, and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from recsys._support.torch_compat import has_gradient_hooks
from recsys.conversion.accelerated import LeftAlone
from recsys.conversion.exchange import find_of_other_classes, tables_of
from recsys.embeddings.lookup.one_table.bag_lookup import require_supported
from recsys.embeddings.rows.table_parameter import require_no_updater
from recsys.embeddings.updaters import require_translatable, require_updatable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from recsys.embeddings.updaters import NamedTable, UpdaterSpec

__all__ = ["find_not_updated", "find_unfit"]


def find_unfit(
    model: nn.Module,
    found: Mapping[nn.Module, list[str]],
    tables: Sequence[NamedTable],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    lazy_adam: bool,
    may_be_meta: bool = False,
) -> dict[nn.Module, LeftAlone]:
    """Find the modules that cannot be replaced.

    Args:
        model: The whole model.
        found: Modules of a class that can be replaced, with their names.
        tables: All tables of these modules.
        optimizers: The torch optimizers that were given.
        lazy_adam: As for `accelerate`.
        may_be_meta: As for `require_updatable`.

    Raises:
        ValueError: no module of `found` can be replaced; or recsys already updates a table.
    """
    left, errors = {}, []
    for module, names in found.items():
        keys = {table.key for table in tables_of(module, names[0])}
        its_tables = [table for table in tables if table.key in keys]
        for table in its_tables:
            require_no_updater(table.name, table.weight)
        try:
            _require_plain_instance(module, names[0])
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                require_supported(module)
            for table in its_tables:
                require_updatable(table, may_be_meta=may_be_meta)
                require_translatable(table, optimizers, lazy_adam=lazy_adam)
        except ValueError as error:
            errors.append(error)
            left[module] = LeftAlone(tuple(names), type(module).__name__, str(error))
    if found and len(left) == len(found):
        raise errors[0]
    for module, names in find_of_other_classes(model).items():
        kind = type(module).__name__
        reason = (
            f"{kind} is a subclass unknown to recsys, which may compute other values than torch's"
        )
        left[module] = LeftAlone(tuple(names), kind, reason)
    return left


def find_not_updated(
    found: Mapping[nn.Module, list[str]], specs: Sequence[UpdaterSpec]
) -> dict[nn.Module, LeftAlone]:
    """Find the modules whose weights require a gradient but are in no given optimizer.

    Args:
        found: Modules that can be replaced, with their names.
        specs: The updaters of the given optimizers.
    """
    left, reason = {}, "no given optimizer has its tables in a param group"
    for module, names in found.items():
        weights = [table.weight for table in tables_of(module, names[0])]
        is_updated = any(id(each) in spec.param_groups for each in weights for spec in specs)
        if not is_updated and any(each.requires_grad for each in weights):
            left[module] = LeftAlone(tuple(names), type(module).__name__, reason)
    return left


def _require_plain_instance(module: nn.Module, name: str) -> None:
    """Refuse a module that has more than its class defines, or no table.

    Raises:
        ValueError: the module has no table; or its own forward, buffers, parameters or modules; or
            a hook on a table.
    """
    tables = list(tables_of(module, name))
    if not tables:
        raise ValueError(f"{name} has no tables")
    own = ["forward"] if "forward" in module.__dict__ else []
    own += [*module._buffers, *(each for each in module._parameters if each != "weight")]
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        own += module._modules
    if own:
        raise ValueError(f"{name} has its own {own[0]!r}, which its replacement would not have")
    for table in tables:
        if has_gradient_hooks(table.weight):
            raise ValueError(
                f"table {table.name!r} has a hook for its gradient, which is not called when "
                "recsys updates the rows; remove the hook by its handle, and with a torch "
                "optimizer change weight.grad between backward and step instead"
            )
