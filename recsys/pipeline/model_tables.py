"""The tables of a model: which ids of a mini-batch each module will look up, and claims for them.

A collection looks up features by name, so the features of a mini-batch are enough. The input of a
bag is known only to the model, so the user passes a function to the pipeline (`ids=`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from recsys._support.user_warnings import warn_caller
from recsys.batch import JaggedIds
from recsys.embeddings.collection import HotColdEmbeddingBagCollection
from recsys.embeddings.embedding_collection import HotColdEmbeddingCollection
from recsys.embeddings.lookup.abstract_tables import AbstractTables, table_modules_in
from recsys.embeddings.lookup.prefetch_requests import prefetch_together
from recsys.embeddings.tiers.transfers import MoveSeconds, Together
from recsys.pipeline.divided_tables import AbstractDividedTables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from recsys.batch import Features
    from recsys.embeddings.lookup.fused_lookup import Part
    from recsys.embeddings.tiers.ahead import Prefetched
    from recsys.embeddings.tiers.table_tiers import Tiers
    from recsys.embeddings.update.row_updater import RowUpdater

__all__ = ["ModelTables", "cancel", "cancel_left", "is_torchrec", "items_of"]

_MOST_NESTED = 4
_HOLD_NO_FEATURES = (Tensor, str, bytes, nn.Module)


class ModelTables:
    """The recsys modules of a model, as its pipeline uses them.

    Args:
        model: Contains the modules.
        ids: As for `TrainPipeline`.

    Attributes:
        modules: The modules whose rows are in two tiers, by the first of their names.
        divided: Those whose rows are in two tiers and divided among processes.
        has_unknown_inputs: Whether the input of one of them was not known at the last `prefetch`.
    """

    def __init__(self, model: nn.Module, ids: Callable[[Any], Any] | None) -> None:
        self._model, self._ids = model, ids
        self._whole = dict(table_modules_in(model))
        self.modules = {name: each for name, each in self._whole.items() if each.tiers()}
        self.divided = [
            each
            for each in model.modules()
            if isinstance(each, AbstractDividedTables) and each.has_tiers
        ]
        self._names = {name: _features_of(each) for name, each in self._whole.items()}
        self._updated = {name: each for name, each in self._whole.items() if each.row_updater}
        self._has_warned = self._are_tiers_known = False
        self.has_unknown_inputs = False
        # Tiers that are rebuilt with other slots keep the same clock.
        self._known_tiers = self.tiers()
        self._times = [tiers.residency.times for tiers in self._known_tiers]

    def __bool__(self) -> bool:
        """Whether there are rows to fetch ahead; the same on all processes."""
        return bool(self.modules or self.divided)

    def gain_by_looking_ahead(self) -> bool:
        """Whether rows are worth fetching before their step begins; the same on all processes.

        From host memory to slots in host memory, a fetch is faster in its step than beside another
        one: both copy with the same cores. Files and a device's copies do not need them.
        """
        in_turn = (each.files is None and each.device.type == "cpu" for each in self.tiers())
        return bool(self.divided) or not all(in_turn)

    def tiers(self) -> list[Tiers]:
        """The tiers of these modules, each once."""
        found: dict[Tiers, None] = {}
        for module in self._tiered():
            found |= dict.fromkeys(module.tiers())
        return list(found)

    def settle(self) -> None:
        """End all pending work of these modules."""
        for module in self._tiered():
            module.settle()

    def _tiered(self) -> list[AbstractTables | AbstractDividedTables]:
        return [*self.modules.values(), *self.divided]

    def waited(self) -> MoveSeconds:
        """Seconds spent on waiting for rows so far."""
        if len(self._times) == 1:  # a fast path: every step calls this several times
            return self._times[0].exposed
        return sum((each.exposed for each in self._times), MoveSeconds())

    def updaters(self) -> list[RowUpdater]:
        """The updaters of all rows of the model, including those of resident modules."""
        found = (module.row_updater for module in self._whole.values())
        return list(dict.fromkeys(each for each in found if each is not None))

    def num_to_take(self, depth: int) -> int:
        """The mini-batches that are taken ahead, for rows of `depth` of them to be fetched.

        If rows are divided among processes, the ids of one more are on their way.
        """
        return depth + 1 if depth and self.divided else depth

    def send(self, batch: Any) -> None:
        """Start to send the ids of a mini-batch to the processes with their rows. A collective.

        Raises:
            Exception: the ids of a process are invalid; every process raises.
        """
        for module in self.divided:
            for features in _features_in(batch):
                module.send(cast("JaggedIds", features))

    def prefetch(self, batch: Any) -> list[Prefetched] | None:
        """Claim slots for the rows of a mini-batch, and fetch the rows in the background.

        Args:
            batch: The mini-batch.

        Returns:
            The claims; None, with nothing claimed, if there are too few slots.

        Raises:
            Exception: any error of a module about its input, or of `ids`; nothing is claimed then.
        """
        claims: list[Prefetched] = []
        for tiers in self._known_tiers:
            tiers.ahead.begin_batch()
        try:
            with Together([tiers.residency.queue for tiers in self._known_tiers]):
                unknown: list[str] = []
                for claim in self._claims(batch, unknown):
                    claims.append(claim)
                    if not claim.has_room:
                        cancel(claims)
                        return None
                self._warn_of(unknown)
        except BaseException:
            for tiers in self._known_tiers:  # an interrupt may come before a claim is in `claims`
                tiers.ahead.give_up_batch()
            raise
        return claims

    def parts(self, batch: Any, batch_size: int, setting: str) -> list[Part]:
        """What the modules whose rows a recsys optimizer updates look up, resident or not.

        Args:
            batch: The mini-batch.
            batch_size: B.
            setting: The setting that needs it, for errors.

        Returns:
            Parts with B bags for each feature: bag b has the ids of sample b.

        Raises:
            ValueError: the input of a module is not known, or does not have a bag for each sample;
                or the model has other modules than before.
            Exception: any error of a module about its input, or of `ids`.
        """
        self._require_same_modules(setting)
        found: list[Part] = []
        unknown: list[str] = []
        for module, arguments in self._calls(batch, self._updated, unknown):
            of_module = module.parts(*arguments)
            if any(part.bags.batch_size != batch_size for part in of_module):
                name = next(name for name, each in self._updated.items() if each is module)
                raise ValueError(
                    f"{setting}: {name!r} looks up {of_module[0].bags.batch_size} bags for a "
                    f"mini-batch of {batch_size} samples, so it is not known which bag belongs to "
                    "which sample; call the module once for each feature, and let ids= return a "
                    "list of the inputs"
                )
            found += of_module
        if unknown:
            raise ValueError(_unknown_ids(setting, unknown))
        return found

    def require_same_modules(self) -> None:
        """Check, at little cost, that no module whose rows recsys updates was replaced.

        The first call also checks that no other module has rows in two tiers.

        Raises:
            ValueError: `recsys.restore` has replaced one, or `recsys.accelerate` has given another
                one two tiers since the pipeline was built.
        """
        if any(module.row_updater is None for module in self._updated.values()):
            self._require_same_modules("pipeline")
        if not self._are_tiers_known:
            for name, module in table_modules_in(self._model):
                if module.tiers() and name not in self.modules:
                    raise ValueError(
                        f"pipeline: the rows of {name!r} are in two tiers, and were not when the "
                        "pipeline was built, so it would fetch none of them ahead; build the "
                        "TrainPipeline after recsys.accelerate"
                    )
            self._are_tiers_known = True

    def _require_same_modules(self, setting: str) -> None:
        for name, module in self._updated.items():
            try:
                is_same = self._model.get_submodule(name) is module
            except AttributeError:
                is_same = False
            if not is_same or module.row_updater is None:
                raise ValueError(
                    f"{setting}: {name!r} is another module than when the pipeline was built, as "
                    "after recsys.restore or recsys.accelerate; build a new TrainPipeline"
                )

    def _claims(self, batch: Any, unknown: list[str]) -> Iterator[Prefetched]:
        """The claims for all lookups, each as it is made; see `_calls`."""
        requests = []
        for module, arguments in self._calls(batch, self.modules, unknown):
            request = module.prefetch_request(*arguments)
            if request is None:
                yield module.prefetch(*arguments)
            else:
                requests.append(request)
        yield from prefetch_together(requests)
        for divided in self.divided:
            for features in _features_in(batch):
                yield divided.prefetch(cast("JaggedIds", features))

    def _calls(
        self, batch: Any, modules: Mapping[str, AbstractTables], unknown: list[str]
    ) -> Iterator[tuple[AbstractTables, tuple[Any, ...]]]:
        """Every lookup of a mini-batch that is known: a module and its arguments.

        Args:
            batch: The mini-batch.
            modules: The modules of interest, by name.
            unknown: Gets the names of those whose input is not known.
        """
        source: Any = batch if self._ids is None else self._ids(batch)
        if self._ids is not None and isinstance(source, Mapping):
            yield from self._named_calls(source, modules, unknown)
            return
        features = [(each, set(each.keys())) for each in _features_in(source)]
        for name, module in modules.items():
            wanted = self._names[name]
            fitting = [each for each, keys in features if wanted and wanted <= keys]
            if len(fitting) == 1:
                yield module, (fitting[0],)
            else:
                unknown.append(name)

    def _named_calls(
        self,
        inputs_by_name: Mapping[str, Any],
        modules: Mapping[str, AbstractTables],
        unknown: list[str],
    ) -> Iterator[tuple[AbstractTables, tuple[Any, ...]]]:
        found: set[nn.Module] = set()
        for name, inputs in inputs_by_name.items():
            module = self._module(name)
            found.add(module)
            if module in modules.values():
                for each in inputs if isinstance(inputs, list) else [inputs]:
                    yield module, each if isinstance(each, tuple) else (each,)
        unknown += [name for name, module in modules.items() if module not in found]

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
            raise ValueError(  # noqa: TRY004  # the name is wrong, not its type
                f"ids: {name!r} must be the name of a module of recsys.embeddings in the model; "
                f"the model has {names}"
            )
        return module

    def _warn_of(self, unknown: Sequence[str]) -> None:
        self.has_unknown_inputs = bool(unknown)
        if not unknown or self._has_warned:
            return
        self._has_warned = True
        result = ", so their rows are fetched only when they are needed"
        warn_caller(_unknown_ids("schedule", unknown, result))


def _unknown_ids(setting: str, names: Sequence[str], result: str = "") -> str:
    """What to say if the input of modules with these names is not known."""
    more = f" and {len(names) - 1} more modules" if len(names) > 1 else ""
    return (
        f"{setting}: it is not known which ids {names[0]!r}{more} will look up{result}; give "
        "TrainPipeline(..., ids=fn), where fn(batch) returns the modules' inputs by name: "
        f"{{{names[0]!r}: (input, offsets), ...}}"
    )


def cancel(claims: Sequence[Prefetched] | None) -> None:
    """Release the claims of a mini-batch."""
    for claim in claims or ():
        claim.cancel()


def cancel_left(claims: Sequence[Prefetched] | None) -> bool:
    """Release the claims that the lookups of a mini-batch have left.

    Returns:
        Whether a lookup has left one that it needs, because it was of other ids.
    """
    left = [claim for claim in claims or () if claim.is_held]
    is_missed = any(claim.is_missed for claim in left)
    cancel(left)
    return is_missed


def _features_of(module: nn.Module) -> set[str]:
    """The features that a collection looks up; none for other modules, which do not name them."""
    tables: Sequence[Any] = ()
    if isinstance(module, HotColdEmbeddingBagCollection):
        tables = module.embedding_bag_configs()
    elif isinstance(module, HotColdEmbeddingCollection):
        tables = module.embedding_configs()
    return {feature for table in tables for feature in table.feature_names}


def _features_in(value: Any, depth: int = 0) -> list[Features]:
    """The sparse features in a mini-batch, also inside its containers and attributes."""
    if isinstance(value, _HOLD_NO_FEATURES):
        return []
    if isinstance(value, JaggedIds) or is_torchrec(value):
        return [cast("Features", value)]
    parts = items_of(value, depth)
    return [found for part in parts for found in _features_in(part, depth + 1)]


def items_of(value: Any, depth: int) -> Iterable[Any]:
    """The items of a container, or the attributes of an object, that is in `depth` others.

    There are none where mini-batches are nested too deeply to be looked through.
    """
    if depth == _MOST_NESTED:
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return vars(value).values() if hasattr(value, "__dict__") else ()


def is_torchrec(value: Any) -> bool:
    """Whether the value is a `KeyedJaggedTensor`."""
    # Importing TorchRec takes seconds. An object of its class exists only if it is imported.
    library = sys.modules.get("torchrec.sparse.jagged_tensor")
    return library is not None and isinstance(value, library.KeyedJaggedTensor)
