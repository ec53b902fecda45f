"""Which module of a model will look up which ids of a mini-batch.

A collection looks up features by name, so a mini-batch that has them says it all. What a bag is
given only its model knows, and whoever builds the pipeline (`ids=`).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from torch import Tensor, nn

from recsys.batch import JaggedIds
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.device_tables import AbstractTables
from recsys.embeddings.embedding_collection import HotColdEmbeddingCollection
from recsys.embeddings.transfers import MoveSeconds
from recsys.pipeline.stalls import Moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from recsys.batch import Features
    from recsys.embeddings.ahead import Prefetched
    from recsys.embeddings.row_updater import RowUpdater
    from recsys.embeddings.tiers import Tiers

__all__ = ["Inputs", "cancel", "is_torchrec"]

_MOST_NESTED = 4


class Inputs:
    """What modules of ours whose rows are in two tiers will look up.

    Args:
        model: Has them.
        ids: As for `TrainPipeline`.

    Attributes:
        modules: Those modules, by the first of their names; none where every row is resident.
        has_untold: Whether nothing tells what one of them is to look up.
    """

    def __init__(self, model: nn.Module, ids: Callable[[Any], Any] | None) -> None:
        self._model, self._ids = model, ids
        ours = {name: each for name, each in model.named_modules() if _is_ours(each)}
        parts = {part for each in ours.values() for part in each.modules() if part is not each}
        self._ours = [module for module in ours.values() if module not in parts]
        self.modules = {
            name: module for name, module in ours.items() if module not in parts and module.tiers()
        }
        self._has_warned = False
        self.has_untold = False
        # Tiers that are made anew, with other slots, go on with the same clock.
        self._times = [tiers.residency.times for tiers in self.tiers()]

    def tiers(self) -> list[Tiers]:
        """Where the rows are."""
        found: dict[Tiers, None] = {}
        for module in self.modules.values():
            found |= dict.fromkeys(module.tiers())
        return list(found)

    def moved(self) -> Moved:
        """What moving rows has taken since the beginning, and how much of it was waited for."""
        if len(self._times) == 1:  # asked for several times a step
            return Moved(self._times[0].busy, self._times[0].exposed)
        return Moved(
            sum((each.busy for each in self._times), MoveSeconds()),
            sum((each.exposed for each in self._times), MoveSeconds()),
        )

    def updaters(self) -> list[RowUpdater]:
        """What moves rows of the model, those of resident modules, too."""
        found = (module.row_updater for module in self._ours)
        return list(dict.fromkeys(each for each in found if each is not None))

    def prefetch(self, batch: Any) -> list[Prefetched] | None:
        """Have the rows of a mini-batch fetched in the background.

        Args:
            batch: The mini-batch.

        Returns:
            What was claimed; None where there are too few slots, and nothing is claimed.

        Raises:
            Exception: what a module finds wrong with its input, or `ids` with the mini-batch; then
                nothing is claimed, either.
        """
        claims: list[Prefetched] = []
        try:
            for module, arguments in self._calls(batch):
                claims.append(module.prefetch(*arguments))
                if not claims[-1].has_room:
                    cancel(claims)
                    return None
        except BaseException:
            cancel(claims)
            raise
        return claims

    def _calls(self, batch: Any) -> Iterator[tuple[AbstractTables, tuple[Any, ...]]]:
        """Every lookup of a mini-batch that can be told: a module, and what it will be given."""
        told: Any = batch if self._ids is None else self._ids(batch)
        if self._ids is not None and isinstance(told, Mapping):
            yield from self._named_calls(told)
            return
        features = list(_features_in(told))
        unknown = []
        for name, module in self.modules.items():
            fitting = [each for each in features if _fits(module, each)]
            if len(fitting) == 1:
                yield module, (fitting[0],)
            else:
                unknown.append(name)
        self._warn_of(unknown)

    def _named_calls(
        self, told: Mapping[str, Any]
    ) -> Iterator[tuple[AbstractTables, tuple[Any, ...]]]:
        found: dict[nn.Module, None] = {}
        for name, inputs in told.items():
            module = self._module(name)
            found[module] = None
            if module in self.modules.values():
                for each in inputs if isinstance(inputs, list) else [inputs]:
                    yield module, each if isinstance(each, tuple) else (each,)
        self._warn_of([name for name, module in self.modules.items() if module not in found])

    def _module(self, name: str) -> AbstractTables:
        try:
            module = self._model.get_submodule(name)
        except AttributeError:
            module = None
        if not isinstance(module, AbstractTables):
            names = [
                name
                for name, module in self._model.named_modules()
                if isinstance(module, AbstractTables)
            ]
            raise ValueError(  # noqa: TRY004  # a name it is, of something else
                f"ids: {name!r} must be the name of a module of recsys.embeddings in the model; "
                f"these are {names}"
            )
        return module

    def _warn_of(self, unknown: Sequence[str]) -> None:
        self.has_untold = bool(unknown)
        if not unknown or self._has_warned:
            return
        self._has_warned = True
        more = f" and {len(unknown) - 1} more modules" if len(unknown) > 1 else ""
        warnings.warn(
            f"schedule: nothing tells which ids {unknown[0]!r}{more} will look up, so their rows "
            "are fetched when they are needed; give TrainPipeline(..., ids=fn), where fn(batch) is "
            f"what each is given, by name: {{{unknown[0]!r}: (input, offsets), ...}}",
            stacklevel=2,
        )


def cancel(claims: Sequence[Prefetched] | None) -> None:
    """Give back what was claimed for a mini-batch."""
    for claim in claims or ():
        claim.cancel()


def _is_ours(module: nn.Module) -> TypeGuard[AbstractTables]:
    return isinstance(module, AbstractTables)


def _fits(module: nn.Module, features: Features) -> bool:
    """Whether features are those that a module looks up."""
    if isinstance(module, HotColdEmbeddingBagCollection):
        tables = module.embedding_bag_configs()
    elif isinstance(module, HotColdEmbeddingCollection):
        tables = module.embedding_configs()
    else:
        return False
    keys = set(features.keys())
    return all(keys.issuperset(table.feature_names) for table in tables)


def _features_in(value: Any, depth: int = 0) -> Iterator[Features]:
    """The sparse features that a mini-batch has, in whatever it keeps them."""
    if isinstance(value, JaggedIds) or is_torchrec(value):
        yield cast("Features", value)
        return
    if depth == _MOST_NESTED or isinstance(value, Tensor | nn.Module | str | bytes):
        return
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    for part in parts:
        yield from _features_in(part, depth + 1)


def is_torchrec(value: Any) -> bool:
    """Whether it is a `KeyedJaggedTensor`."""
    # Who has one has imported it; importing it here takes seconds.
    library = sys.modules.get("torchrec.sparse.jagged_tensor")
    return library is not None and isinstance(value, library.KeyedJaggedTensor)
