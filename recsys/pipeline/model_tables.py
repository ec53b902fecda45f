"""The tables of a model: which ids of a mini-batch each module will look up, and claims for them.

A collection looks up features by name, so the features of a mini-batch are enough. The input of a
bag is known only to the model, so the user passes a function to the pipeline (`ids=`).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from recsys._support.user_code import warn_caller
from recsys.batch import JaggedIds
from recsys.embeddings.tables_module import TableModule, table_modules_in
from recsys.embeddings.tiers.fetch import claim_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from recsys.batch import Features
    from recsys.embeddings.lookup.lookup import Part
    from recsys.embeddings.rows.bags import Bags
    from recsys.embeddings.tiers.fetch import Claims, Fetcher
    from recsys.embeddings.update.fused_optimizer import FusedOptimizer

__all__ = ["AbstractDividedTables", "ModelTables", "is_torchrec", "items_of"]

_MOST_NESTED = 4
_HOLD_NO_FEATURES = (Tensor, str, bytes, nn.Module)


class AbstractDividedTables(nn.Module, ABC):
    """A module that looks up rows that are divided among processes.

        send        ids travel to the processes that have their rows: a collective
        prefetch    each process claims slots for its rows and fetches them: no collective
        forward     finds the ids that were sent; a collective

    Whether a process has slots for the rows of a mini-batch is known to that process alone. So
    nothing that depends on it may decide about a collective.

    Attributes:
        has_tiers: Whether rows are in two tiers on any process; the same on all.
    """

    has_tiers = False

    @abstractmethod
    def send(self, features: JaggedIds) -> None:
        """Start to send the ids of a later mini-batch, and do not wait for them. A collective.

        Args:
            features: The input of a later `forward`, the very object.

        Raises:
            Exception: the ids of a process are invalid; every process raises.
        """

    @abstractmethod
    def prefetch(self, features: JaggedIds) -> Claims:
        """Wait for ids that were sent, and start to fetch this process's rows. No collective."""

    @abstractmethod
    def fetchers(self) -> list[Fetcher]:
        """What moves this process's rows; empty if all are in fast memory."""


class ModelTables:
    """The recsys modules of a model, as its pipeline uses them.

    Args:
        model: Contains the modules.
        ids: As for `TrainPipeline`.

    Attributes:
        modules: The modules whose rows are in two tiers, by the first of their names.
        divided: Those whose rows are in two tiers and divided among processes.
        fetchers: Those of the table groups of both.
    """

    def __init__(self, model: nn.Module, ids: Callable[[Any], Any] | None) -> None:
        self._model, self._ids = model, ids
        self._whole = {
            name: module for name, module in table_modules_in(model).items() if module.groups()
        }
        found = [module for module in model.modules() if isinstance(module, AbstractDividedTables)]
        self.divided = [module for module in found if module.has_tiers]
        with_slots = {name: module for name, module in self._whole.items() if _fetchers_of(module)}
        inside = {part for module in found for part in module.modules()}
        self.modules = {name: module for name, module in with_slots.items() if module not in inside}
        self._whole_fetchers = dict.fromkeys(
            one for module in self.modules.values() for one in _fetchers_of(module)
        )
        divided = [one for module in self.divided for one in module.fetchers()]
        self.fetchers = [*self._whole_fetchers, *divided]
        self._updated = {name: module for name, module in self._whole.items() if module.updates()}
        self._names = {name: _features_of(module) for name, module in self._whole.items()}
        self._has_warned = False

    def __bool__(self) -> bool:
        """Whether there are rows to fetch ahead; the same on all processes."""
        return bool(self.modules or self.divided)

    def gain_by_looking_ahead(self) -> bool:
        """Whether rows are worth fetching before their step begins; the same on all processes.

        From host memory to slots in host memory, a fetch is faster in its step than beside another
        one: both copy with the same cores. Files and a device's copies do not need them.
        """
        groups = [group for module in self.modules.values() for group in module.groups()]
        return bool(self.divided) or any(
            group.files is not None or group.is_on_device for group in groups
        )

    def settle(self) -> None:
        """Wait until no row of these modules is on its way."""
        for fetcher in self.fetchers:
            fetcher.settle()

    def waited(self) -> float:
        """Seconds spent on waiting for rows so far."""
        return sum(fetcher.waited for fetcher in self.fetchers)

    def row_optimizers(self) -> list[FusedOptimizer]:
        """The optimizers of recsys in the model, including those of resident modules."""
        found = (
            module.row_optimizer or (module.attachment and module.attachment.row_optimizer)
            for module in self._whole.values()
        )
        return list(dict.fromkeys(optimizer for optimizer in found if optimizer is not None))

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

    def prefetch(self, batch: Any) -> Claims | None:
        """Claim slots for the rows of a mini-batch, and fetch the rows in the background.

        Args:
            batch: The mini-batch.

        Returns:
            The claims; None if one before it is short of slots.

        Raises:
            Exception: any error of a module about its input, or of `ids`; nothing is claimed then.
        """
        unknown: list[str] = []
        claims = claim_together(self._lookups(batch, unknown))
        for module in self.divided:
            for features in _features_in(batch):
                claims += module.prefetch(cast("JaggedIds", features))
        self._warn_of(unknown)
        return None if any(claimed is None for _, claimed in claims) else claims

    def begin(self, claims: Claims | None, *, is_waiting: bool = True) -> None:
        """Begin to compute a mini-batch; divided tables do so in their `forward`.

        Args:
            claims: What `prefetch` returned; None if nothing was claimed.
            is_waiting: Whether to wait for all its rows.
        """
        known = dict(claims or ())
        for fetcher in self._whole_fetchers:
            fetcher.begin(known.get(fetcher), is_waiting=is_waiting)

    def unpinned_samples(self, batch: Any) -> list[Tensor]:
        """Which samples look up a row that is not pinned: (B,) bool for each lookup of the batch.

        Empty if it is not known what a module looks up.
        """
        unknown: list[str] = []
        found = self._lookups(batch, unknown)
        return [
            group.fetcher.unpinned_samples(lookups, bags)
            for (group, lookups), bags in found
            if group.fetcher is not None and not unknown
        ]

    def _lookups(self, batch: Any, unknown: list[str]) -> list[tuple[Part, Bags]]:
        return [
            lookup
            for module, arguments in self._calls(batch, self.modules, unknown)
            for lookup in module.lookups(*arguments)
        ]

    def parts(self, batch: Any, batch_size: int, setting: str) -> list[tuple[Part, Bags]]:
        """What the modules whose rows recsys updates look up, resident or not.

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
        self.require_same_modules()
        found: list[tuple[Part, Bags]] = []
        unknown: list[str] = []
        for module, arguments in self._calls(batch, self._updated, unknown):
            of_module = module.lookups(*arguments)
            if any(bags.num_samples != batch_size for _, bags in of_module):
                name = next(
                    name for name, candidate in self._updated.items() if candidate is module
                )
                raise ValueError(
                    f"{setting}: {name!r} looks up {of_module[0][1].num_samples} bags for a "
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

        Raises:
            ValueError: `recsys.restore` has replaced one.
        """
        for name, module in self._whole.items():
            if not module.groups():
                raise ValueError(
                    f"pipeline: {name!r} is another module than when the pipeline was built, as "
                    "after recsys.restore or recsys.accelerate; build a new TrainPipeline"
                )

    def _calls(
        self, batch: Any, modules: Mapping[str, TableModule], unknown: list[str]
    ) -> Iterator[tuple[TableModule, tuple[Any, ...]]]:
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
        features = [(jagged, set(jagged.keys())) for jagged in _features_in(source)]
        for name, module in modules.items():
            wanted = self._names[name]
            fitting = [jagged for jagged, keys in features if wanted and wanted <= keys]
            if len(fitting) == 1:
                yield module, (fitting[0],)
            else:
                unknown.append(name)

    def _named_calls(
        self,
        inputs_by_name: Mapping[str, Any],
        modules: Mapping[str, TableModule],
        unknown: list[str],
    ) -> Iterator[tuple[TableModule, tuple[Any, ...]]]:
        found: set[nn.Module] = set()
        for name, inputs in inputs_by_name.items():
            module = self._module(name)
            found.add(module)
            if module in modules.values():
                for args in inputs if isinstance(inputs, list) else [inputs]:
                    yield module, args if isinstance(args, tuple) else (args,)
        unknown += [name for name, module in modules.items() if module not in found]

    def _module(self, name: str) -> TableModule:
        try:
            module = self._model.get_submodule(name)
        except AttributeError:
            module = None
        if not isinstance(module, TableModule):
            names = [
                name
                for name, module in self._model.named_modules()
                if isinstance(module, TableModule)
            ]
            raise ValueError(  # noqa: TRY004  # the name is wrong, not its type
                f"ids: {name!r} must be the name of a module of recsys.embeddings in the model; "
                f"the model has {names}"
            )
        return module

    def _warn_of(self, unknown: Sequence[str]) -> None:
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


def _fetchers_of(module: TableModule) -> list[Fetcher]:
    return [group.fetcher for group in module.groups() if group.fetcher is not None]


def _features_of(module: nn.Module) -> set[str]:
    """The features that a collection looks up; none for other modules, which do not name them."""
    pooled = getattr(module, "embedding_bag_configs", None)
    configs: Any = pooled or getattr(module, "embedding_configs", tuple)
    return {feature for table in configs() for feature in table.feature_names}


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
