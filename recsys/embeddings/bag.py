"""`HotColdEmbeddingBag`: an `nn.EmbeddingBag` whose rows recsys updates.

    input, offsets -> BagCalls, DeviceCalls -> pooled vectors    a sum or mean; calls share a node
                   -> read_bags -> BagLookup -> pooled vectors   all others; names an invalid id
    gradient -> ledger -> update

It is a subclass of `nn.EmbeddingBag`. Without an optimizer it computes the same, and its errors
name the sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys._support.torch_compat import not_compiled
from recsys.embeddings.rows.bag_input import BagInput, read_bags
from recsys.embeddings.rows.table_parameter import require_no_updater
from recsys.embeddings.table_module import TableModule, allocate_rows
from recsys.embeddings.tier_arguments import TierArguments
from recsys.embeddings.tiers.ahead import Prefetched

if TYPE_CHECKING:
    from pathlib import Path

    from recsys.embeddings.lookup.fused_lookup import Part
    from recsys.embeddings.lookup.prefetch_requests import PrefetchRequest
    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan

__all__ = ["HotColdEmbeddingBag"]


class HotColdEmbeddingBag(TableModule, nn.EmbeddingBag):
    """A drop-in for `torch.nn.EmbeddingBag`.

    Args:
        num_embeddings: E, rows.
        embedding_dim: D, columns.
        max_norm: As in torch; None with an optimizer.
        norm_type: As in torch.
        scale_grad_by_freq: As in torch; False with an optimizer.
        mode: "sum", "mean" or, without an optimizer, "max".
        sparse: Whether `weight.grad` is sparse. It does not change how `optimizer` updates rows.
        _weight: The rows, (E, D), used without a copy; None draws them from N(0, 1).
        include_last_offset: Whether the last number of `offsets` is the end of the last bag.
        padding_idx: A row that is left out of pooling and gets no gradient.
        device: Device of the rows; with a budget, of the rows in fast memory. With an optimizer
            it must be the CPU, CUDA, or "meta" until `to_empty`. On CUDA, invalid ids raise on a
            later call, or in `check_input`.
        dtype: Type of the rows; with an optimizer float32, float64 or bfloat16. Rows of bfloat16
            are pooled and updated in float32.
        optimizer: The update rule of the rows; None leaves gradients to a torch optimizer.
        auto_apply: Whether `optimizer` updates rows at the end of each backward. If False,
            `row_optimizer.step()` updates them once for all backward passes since the last step.
            Accumulation, clipping and `GradScaler` need False: with True, each backward updates
            rows by its gradients as they are, which are those of the scaled loss.
            One thread trains; others may evaluate meanwhile, under `torch.no_grad()`.
        stochastic_rounding: For rows of bfloat16 with an optimizer: round up or down at
            random so that a row is right on average, as FBGEMM does. False rounds to nearest, which
            loses updates that are small compared with the row.
        rounding_seed: Seed of that rounding. The same seed gives the same bits, because the
            random numbers depend only on seed, step and position of the row.
        budget: Fast memory in bytes or as "256MiB", for rows, their state and row maps. Rows that
            do not fit stay in `weight`, the cold store. Results are the same to the last bit. A
            budget needs an optimizer. Write to rows only through `weight`: a write through a tensor
            kept from before may raise `ConflictingWrite`, and a write through a kept numpy array is
            not seen. None takes the budget of `plan`, or keeps all rows in fast memory.
        plan: Rows that never leave fast memory, as a plan of a single table of this size, by any
            name; see `plan_hot_rows`. Without a plan, rows in frequent use stay in fast memory.
        cold_tier: Cold store: "host" in memory, or "file" in a folder on disk, for tables that are
            larger than memory.
        cold_path: Folder of the cold tier "file", created if missing: it chooses the disk. The
            files are scratch space without names, and are freed with the module. To keep rows, save
            a checkpoint or `state_dict()`.

    Attributes:
        row_optimizer: `optimizer` as a torch optimizer, with `param_groups`; None without one.

    Raises:
        AssertionError: `padding_idx` is not a row, or `_weight` has another shape.
        ProfileError: the plan is for other tables.
        ColdTierError: the folder cannot be used, or the disk is full.
        TypeError: the optimizer is not a formula, or the plan no `HotPlan`.
        ValueError: a recsys optimizer does not support the device or dtype of the rows, or a
            setting.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
        budget: int | str | None = None,
        plan: HotPlan | None = None,
        cold_tier: str = "host",
        cold_path: Path | str | None = None,
    ) -> None:
        rows = allocate_rows(
            (num_embeddings, embedding_dim),
            _weight,
            dtype,
            optimizer,
            TierArguments(budget, plan, cold_tier, cold_path, device),
        )
        super().__init__(
            num_embeddings,
            embedding_dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            rows.weight,
            include_last_offset,
            padding_idx,
            device,
            dtype,
        )
        if rows.are_to_draw:
            self.reset_parameters()
        self.row_optimizer = None
        if optimizer is not None:
            updater = self._optimize(
                optimizer,
                auto_apply=auto_apply,
                stochastic_rounding=stochastic_rounding,
                rounding_seed=rounding_seed,
            )
            rows.tiers.begin(updater, [("weight", cast("nn.Parameter", self.weight))])

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up and pool.

        Args:
            input: Ids of rows, one bag a line, or with `offsets` one bag after the other.
            offsets: Where each bag begins in a one-dimensional input.
            per_sample_weights: A factor for each id, with mode "sum".

        Shape:
            input (B, L), or (N,) with offsets (B,) or (B + 1,); per_sample_weights as input;
            result (B, D).

        Raises:
            IdOutOfRange: an id is not a row; on CUDA this may be an id of an earlier input.
            MalformedBags: input, offsets and weights do not make bags; on CUDA, offsets of an
                earlier input may not.
            NotImplementedError: there are weights, and `mode` is not "sum".
            ValueError: a weight is nan; the module's settings exclude each other; or the input is
                on another device than the rows.
        """
        if type(input) is not Tensor:
            traced = self._leaf_call(input, offsets, per_sample_weights)
            if traced is not None:
                return cast("Tensor", traced)
        if self._updater is not None:
            if torch.compiler.is_compiling():
                return self._break_graph(input, offsets, per_sample_weights)
            return self._look_up(input, offsets, per_sample_weights)
        if torch.compiler.is_compiling() or not input.is_cpu:
            return super().forward(input, offsets, per_sample_weights)
        bags = self._read(input, offsets, per_sample_weights)
        try:
            return self._pool_by_torch(bags, self.weight)
        except (IndexError, RuntimeError) as error:
            bad = bags.first_bad(len(self.weight))
            if bad is None:
                raise
            raise bags.id_error(bad, len(self.weight)) from error

    def prefetch(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Prefetched:
        """Start to fetch the rows of a later lookup in the background.

        The next training `forward` of the same ids uses the fetched rows. Any other `forward` stays
        correct. If slots are scarce, the latest prefetch is given up first. `TrainPipeline` calls
        this. Without tiers it does nothing.

        Args:
            input: As for `forward`.
            offsets: As for `forward`.
            per_sample_weights: As for `forward`.

        Shape:
            As for `forward`.

        Returns:
            The claim on slots; it need not be kept.

        Raises:
            IdOutOfRange: as for `forward`.
            MalformedBags: as for `forward`.
            NotImplementedError: as for `forward`.
            ValueError: as for `forward`.
        """
        if not self.tiers():
            return Prefetched(())
        return self._request(input, offsets, per_sample_weights).claim()

    def parts(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> list[Part]:
        """The rows that `forward` looks up; see `AbstractTables.parts`."""
        return self._bag_lookup().parts(self._read(input, offsets, per_sample_weights))

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        optimizer: RowOptimizer | None = None,
        auto_apply: bool = True,
        stochastic_rounding: bool = True,
        rounding_seed: int = 0,
    ) -> HotColdEmbeddingBag:
        """Make a module from existing rows, which share their memory with it.

        It takes no budget: with one, give the rows to the class, as `_weight`.

        Args:
            embeddings: The rows.
            freeze: Whether rows are never updated; True by default, as in torch.
            max_norm: As for the class.
            norm_type: As for the class.
            scale_grad_by_freq: As for the class.
            mode: As for the class.
            sparse: As for the class.
            include_last_offset: As for the class.
            padding_idx: As for the class.
            optimizer: As for the class; it does nothing while rows are frozen.
            auto_apply: As for the class.
            stochastic_rounding: As for the class.
            rounding_seed: As for the class.

        Shape:
            embeddings (E, D).

        Raises:
            AssertionError: `embeddings` does not have two dimensions.
        """
        module = super().from_pretrained(
            embeddings,
            freeze,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            include_last_offset,
            padding_idx,
        )
        assert isinstance(module, HotColdEmbeddingBag)  # torch builds a cls
        module._optimize_pretrained(
            optimizer,
            freeze=freeze,
            auto_apply=auto_apply,
            stochastic_rounding=stochastic_rounding,
            rounding_seed=rounding_seed,
        )
        return module

    @classmethod
    def from_torch(
        cls, bag: nn.EmbeddingBag, *, optimizer: RowOptimizer | None = None, auto_apply: bool = True
    ) -> HotColdEmbeddingBag:
        """Make a module with the settings and the same Parameter as a torch module.

        If `apply_optimizer_in_backward` gave the table an optimizer, this module reads its settings
        and state once, and removes its hook. Gradients from other uses of the table, such as a
        lookup by `bag`, join the update after the next backward of this module.

        Args:
            bag: The torch module. It remains usable and shares its rows.
            optimizer: The update rule of the rows. None takes the optimizer that
                `apply_optimizer_in_backward` gave the table; without one, gradients are left to
                torch, sparse or dense as `bag.sparse` says.
            auto_apply: As for the class.

        Raises:
            ValueError: a recsys optimizer does not support the rows, or already updates them; or
                `apply_optimizer_in_backward` gave the table an optimizer that cannot be translated,
                or one in addition to `optimizer`.
        """
        require_no_updater("weight", cast("nn.Parameter", bag.weight))
        module = cls._on_weight_of(bag)
        module._take_over(bag, optimizer, auto_apply=auto_apply)
        return module

    @classmethod
    def _on_weight_of(cls, bag: nn.EmbeddingBag) -> HotColdEmbeddingBag:
        module = cls(
            bag.num_embeddings,
            bag.embedding_dim,
            bag.max_norm,
            bag.norm_type,
            bag.scale_grad_by_freq,
            bag.mode,
            bag.sparse,
            bag.weight,
            bag.include_last_offset,
            bag.padding_idx,
        )
        module.weight = bag.weight
        return module

    def _read(
        self,
        input: Tensor,
        offsets: Tensor | None,
        per_sample_weights: Tensor | None,
    ) -> BagInput:
        return read_bags(
            input,
            offsets,
            per_sample_weights,
            include_last_offset=self.include_last_offset,
            mode=self.mode,
            dtype=self.weight.dtype,
            is_deferred=self._group is not None and self._group.kernels.errors is not None,
        )

    def _request(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> PrefetchRequest:
        if offsets is None and per_sample_weights is None and self.padding_idx is None:
            request = self._request_fast(input)
            if request is not None:
                return request
        return self._bag_lookup().request(self._read(input, offsets, per_sample_weights))

    def _request_fast(self, input: Tensor) -> PrefetchRequest | None:
        """The request for bags of one id each; None if input or settings need `BagLookup`."""
        if (
            self.mode not in ("sum", "mean")
            or self.max_norm is not None
            or self.scale_grad_by_freq
            or type(input) is not Tensor
            or input.is_nested
            or input.dim() != 2
            or input.shape[1] != 1
        ):
            return None
        calls, lookups = self._calls_and_lookups()
        return calls.request(lookups, input, (input.shape[0],))

    def _pool_by_torch(self, bags: BagInput, rows: Tensor) -> Tensor:
        return functional.embedding_bag(
            bags.values,
            rows,
            bags.offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            bags.weights,
            include_last_offset=True,
            padding_idx=self.padding_idx,
        )

    @not_compiled
    def _break_graph(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        return self._look_up(input, offsets, per_sample_weights)

    def _look_up(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        pooled = self._pool_fast(input, offsets, per_sample_weights)
        if pooled is not None:
            return pooled
        lookup = self._bag_lookup()  # before ids are read, which torch.export cannot trace
        bags = self._read(input, offsets, per_sample_weights)
        return lookup.pool(bags).to(self.weight.dtype)

    def _pool_fast(
        self, input: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> Tensor | None:
        """Look up and pool by `BagCalls`.

        Returns:
            None if the input or the module's settings need `fused_lookup`.
        """
        if (
            (self.mode != "sum" and (self.mode != "mean" or weights is not None))
            or self.max_norm is not None
            or self.scale_grad_by_freq
            or type(input) is not Tensor
            or input.is_nested
        ):
            return None
        if offsets is None:
            if input.dim() != 2 or not input.numel():
                return None
            num_bags = input.shape[0]
        elif type(offsets) is Tensor and input.dim() == 1 and offsets.dim() == 1:
            num_bags = offsets.shape[0] - int(self.include_last_offset)
        else:
            return None
        calls, lookups = self._calls_and_lookups()
        return calls.look_up(
            lookups,
            input,
            offsets,
            weights,
            (num_bags,),
            is_mean=self.mode == "mean",
            padding_idx=None,
            left_out=self.padding_idx,
        )
