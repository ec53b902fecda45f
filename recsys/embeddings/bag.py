"""`HotColdEmbeddingBag`: `nn.EmbeddingBag` whose rows are updated by an optimizer of their own.

    input, offsets -> read_bags -> fused_lookup -> pooled vectors
    gradient -> ledger -> update

It is an `nn.EmbeddingBag`, so code that expects one takes it. Without an optimizer it computes as
one; what it adds is errors that name the sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys._support.tracing import leaf_call
from recsys.embeddings.lookup.bag_lookup import pool_fused, prefetch_bags
from recsys.embeddings.rows.bag_input import BagInput, read_bags
from recsys.embeddings.table_module import TableModule, find_rows, is_left_to_torch, require_plain
from recsys.embeddings.tiers.ahead import Prefetched

if TYPE_CHECKING:
    from pathlib import Path

    from recsys.embeddings.optimizer import RowOptimizer
    from recsys.embeddings.popularity.plan import HotPlan

__all__ = ["HotColdEmbeddingBag"]


class HotColdEmbeddingBag(TableModule, nn.EmbeddingBag):
    """A drop-in for `torch.nn.EmbeddingBag`.

    Args:
        num_embeddings: E, rows.
        embedding_dim: D, columns.
        max_norm: Rows looked up whose norm is larger are scaled down to it, in place.
        norm_type: The p of that norm.
        scale_grad_by_freq: Whether a row's gradient is divided by how often the mini-batch has it.
            With an optimizer this holds for every row. Without one torch computes the gradient, and
            its CPU kernel may divide by the count of another row (pytorch#190063).
        mode: "sum", "mean" or "max".
        sparse: Whether `weight.grad` is sparse; `optimizer` updates rows alike in either case.
        _weight: The rows, (E, D), which are shared; drawn from N(0, 1) where None.
        include_last_offset: Whether `offsets` has the last bag's end, too.
        padding_idx: A row that counts for nothing wherever it is looked up.
        device: Where the rows live, or with a budget those in fast memory; with an optimizer the
            CPU, CUDA, or "meta" until `to_empty`. On CUDA, invalid ids raise on a later call, or in
            `check_input`.
        dtype: Of the rows; with an optimizer float32, float64, bfloat16 or float16. Rows of
            the last two are pooled and updated in float32.
        optimizer: How rows are updated; None leaves a gradient to an optimizer of torch's.
        auto_apply: With an optimizer: update at the end of each backward. Where False,
            `row_optimizer.step()` updates, once for all backward passes since the last.
        stochastic_rounding: Of rows of bfloat16 or float16 that `optimizer` updates: up or down
            with the probabilities that make a row right on average, as in FBGEMM; where False, to
            nearest, which loses steps that are small beside the row.
        rounding_seed: Of that chance. Rows depend on it, the step and their place alone, so the
            same seed gives the same bits.
        budget: Bytes that rows in fast memory may take, with their state and what it takes to find
            them, as a number or like "256MiB". Rows that do not fit wait in `weight`, which is
            then the cold store; what is computed is the same to the last bit. It needs an
            optimizer. Write to rows through `weight` each time: a write by a tensor that was kept
            may be a `ConflictingWrite`, one by a kept numpy array is not seen. None keeps all rows
            in fast memory, or has that of `plan`.
        plan: Which rows are never to leave fast memory: one of a single table of this size, by any
            name; see `plan_hot_rows`. Without one, rows that are used often stay by being used.
        cold_tier: Where rows wait that do not fit: "host", in memory, or "file", in a folder on
            disk, for tables that are larger than memory.
        cold_path: That folder. Made where there is none; one that an earlier module has left whole
            brings its rows and their state, but no settings of the optimizer. `sync`, or the end of
            the process, leaves it whole.

    Attributes:
        row_optimizer: `optimizer` as an optimizer of torch's, for its `param_groups`; None without.

    Raises:
        AssertionError: `padding_idx` is no row, or `_weight` has another shape.
        ProfileError: the plan is of other tables.
        ColdTierError: the folder cannot be used, has another table, or there is no room.
        ValueError: rows are such as a recsys optimizer cannot update.
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
        rows = find_rows(
            (num_embeddings, embedding_dim),
            _weight,
            device,
            dtype,
            optimizer=optimizer,
            budget=budget,
            plan=plan,
            cold_tier=cold_tier,
            cold_path=cold_path,
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
            self._optimize(
                optimizer,
                auto_apply=auto_apply,
                stochastic_rounding=stochastic_rounding,
                rounding_seed=rounding_seed,
                budget=budget,
                plan=rows.plan,
                files=rows.files,
                device=device,
            )

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up and pool.

        Shape:
            input (B, L), or (N,) with offsets (B,) or (B + 1,), or nested; per_sample_weights as
            input; result (B, D).

        Raises:
            IdOutOfRange: a value is no row; on CUDA, of an input before.
            MalformedBags: input, offsets and weights do not make bags; offsets as above.
            NotImplementedError: there are weights, and `mode` is not "sum".
            ValueError: a weight is not a number, as above; the module's settings exclude each
                other; or the input is not where the rows are.
        """
        if type(input) is not Tensor:
            traced = leaf_call(self, input, offsets, per_sample_weights)
            if traced is not None:
                return cast("Tensor", traced)
        if self._updater is not None:
            if torch.compiler.is_compiling():
                return cast("Tensor", self._break_graph(input, offsets, per_sample_weights))
            return self._look_up(input, offsets, per_sample_weights)
        if self._is_part:
            self._warn_of_part()
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
        """Have the rows of a lookup to come fetched in the background.

        The next forward of the very same ids that backward may come back to has them claimed then;
        any other forward is right, too, and where slots are scarce, the claim made last goes first.
        `TrainPipeline` calls it. Where every row is resident, it does nothing.

        Shape:
            As for `forward`.

        Raises:
            IdOutOfRange: as for `forward`.
            MalformedBags: as for `forward`.
            NotImplementedError: as for `forward`.
            ValueError: as for `forward`.
        """
        if not self.tiers():
            return Prefetched(())
        return prefetch_bags(self, self._place(), self._read(input, offsets, per_sample_weights))

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
        """A module on rows that are there already; it shares their memory.

        Args:
            embeddings: The rows.
            freeze: Whether they stay as they are; as in torch they do, unless told otherwise.
            max_norm: As for the class.
            norm_type: As for the class.
            scale_grad_by_freq: As for the class.
            mode: As for the class.
            sparse: As for the class.
            include_last_offset: As for the class.
            padding_idx: As for the class.
            optimizer: As for the class; it has nothing to do while rows are frozen.
            auto_apply: As for the class.
            stochastic_rounding: As for the class.
            rounding_seed: As for the class.

        Shape:
            embeddings (E, D).

        Raises:
            AssertionError: `embeddings` has not two dimensions.
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
        """Take over a module of torch's: its settings and its very Parameter.

        Where `apply_optimizer_in_backward` has marked the table, its optimizer does not step any
        more: its hook is taken away, its state goes on here. What reaches the table otherwise, a
        lookup by `bag` too, is part of the update after the next backward of this module. Only
        `recsys.accelerate` has a way back, `recsys.restore`.

        Args:
            bag: It may be used on, on the same rows.
            optimizer: How rows are updated. None takes what `apply_optimizer_in_backward` has
                marked the table with, its state too; where it has not, `bag.sparse` decides on the
                gradient.
            auto_apply: As for the class.

        Raises:
            ValueError: rows are such as a recsys optimizer cannot update, or another one updates
                them already; or the table is marked, and with an optimizer that has no formula
                here, or although `optimizer` is given.
        """
        require_plain(bag)
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _break_graph(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        return self._look_up(input, offsets, per_sample_weights)

    def _look_up(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        pooled = None if per_sample_weights is not None else self._pool_simply(input, offsets)
        if pooled is not None:
            return pooled
        if is_left_to_torch(input, self.weight):
            return super().forward(input, offsets, per_sample_weights)
        bags = self._read(input, offsets, per_sample_weights)
        return pool_fused(self, self._place(), bags).to(self.weight.dtype)

    def _pool_simply(self, input: Tensor, offsets: Tensor | None) -> Tensor | None:
        """Look up and pool in the shortest way.

        Returns:
            None where it takes more than to add rows up, or something is wrong.
        """
        if (
            (self.mode != "sum" and self.mode != "mean")
            or self.max_norm is not None
            or self.padding_idx is not None
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
            num_bags = offsets.shape[0] - self.include_last_offset
        else:
            return None
        return self._call(
            input, offsets, (num_bags,), is_mean=self.mode == "mean", padding_idx=None
        )
