r"""DLRM with TorchRec's signatures, submodule names and state_dict keys.

    dense_features (B, I) -> DenseArch  -> (B, D)    --\
                                                        InteractionArch -> OverArch -> logits
    sparse_features       -> SparseArch -> (B, F, D) --/

Another interaction may take the place of the dot products.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn
from torch.nn import functional

from recsys.models.archs import MLP, AbstractPooledModel, DenseArch, OverArch, SparseArch
from recsys.models.interaction import InteractionArch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from recsys.batch import Batch

__all__ = ["DLRM", "MLP", "DLRMTrain", "DenseArch", "OverArch", "SparseArch", "initialize_classic"]


class DLRM(AbstractPooledModel):
    """Deep Learning Recommendation Model; a drop-in for `torchrec.models.dlrm.DLRM`.

    Args:
        embedding_bag_collection: The tables. If all have one `embedding_dim`, it must be D; if they
            have different dims, `SparseArch` projects them to D.
        dense_in_features: I, dense features. With 0, the dense vector is a learned constant.
        dense_arch_layer_sizes: Bottom MLP; the last size is D.
        over_arch_layer_sizes: Top MLP; at least two sizes.
        dense_device: Device of the MLPs.
        interaction: Combines a sample's vectors: a module that maps (B, D) and (B, F, D) to (B,
            `out_features`), such as `MaskedTransformerArch`. None for the dot products of all
            pairs.

    Shape:
        dense_features (B, I); sparse_features: F features of B samples; result: logits (B,
        over_arch_layer_sizes[-1]).

    Raises:
        TypeError: `interaction` has no integer `out_features`, or the collection does not pool.
        ValueError: there is no table, or sizes do not fit each other.

    References:
        Naumov et al. (2019), Deep Learning Recommendation Model for Personalization and
        Recommendation Systems.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
        *,
        interaction: nn.Module | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, dense_device
        )
        if interaction is None:
            num_sparse = len(self.sparse_arch.sparse_feature_names)
            interaction = InteractionArch(num_sparse, self.sparse_arch.interaction_dim)
        width = getattr(interaction, "out_features", None)
        if not isinstance(width, int):
            raise TypeError(
                f"interaction {type(interaction).__name__} must have an int out_features, the "
                f"width of its result, got {width!r}"
            )
        self.inter_arch = interaction
        self.over_arch = OverArch(width, over_arch_layer_sizes, dense_device)

    def head(self, embedded_dense: Tensor, embedded_sparse: Tensor) -> Tensor:
        """Logits, (B, over_arch_layer_sizes[-1]), of samples whose vectors are known.

        Args:
            embedded_dense: Results of `dense_arch`, (B, D).
            embedded_sparse: Results of `sparse_arch`, (B, F, D).
        """
        return cast("Tensor", self.over_arch(self.inter_arch(embedded_dense, embedded_sparse)))


class DLRMTrain(nn.Module):
    """A model with its loss, in the form that training pipelines call.

    Args:
        dlrm_module: A `DLRM`, or another model of the same inputs; its last layer has one output.

    Attributes:
        uses_sample_weights: True: each sample's loss is multiplied by the mini-batch's `weights`,
            if it has any, and the sum is divided by B, unless `loss_fn.reduction` is another.

    Shape:
        result (loss, (loss, logits, labels)): loss () with gradient, then detached tensors: loss
        (), logits (B,) and labels (B,).
    """

    uses_sample_weights = True

    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Mean binary cross-entropy of the batch, and the tensors that a pipeline reports.

        Args:
            batch: B samples with their labels.

        Returns:
            (loss, (loss, logits, labels)): the loss, (), with gradient; then detached tensors: the
            loss, logits (B,) and labels (B,).

        Raises:
            TypeError: the batch has weights, and `loss_fn` was replaced by one of another class, or
                by one with weights of its own.
        """
        weights = getattr(batch, "weights", None)
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        if weights is None:
            loss = self.loss_fn(logits, batch.labels.float())
        else:
            loss_fn: nn.Module = self.loss_fn
            if not isinstance(loss_fn, nn.BCEWithLogitsLoss) or loss_fn.weight is not None:
                raise TypeError(
                    "DLRMTrain: for a mini-batch with weights, loss_fn must be a BCEWithLogitsLoss "
                    f"without weight, got {loss_fn}; leave the weights of samples out, or write a "
                    "model that uses them"
                )
            loss = functional.binary_cross_entropy_with_logits(
                logits,
                batch.labels.float(),
                weights,
                reduction=loss_fn.reduction,
                pos_weight=loss_fn.pos_weight,
            )
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def initialize_classic(module: nn.Module) -> None:
    """Initialize linear layers as facebookresearch/dlrm does, from torch's default generator.

    For a layer with m outputs and n inputs, weights are normal with variance 2 / (m + n), biases
    with variance 1 / m. Embeddings are not changed: the embedding modules here already follow the
    classic rule, uniform in +-sqrt(1 / E). Parameters that are not in an `nn.Linear`, such as those
    of a cross network, and those of attention (modules with `initializes_itself = True`), keep
    their own initial values: the rule was made for wide MLPs.
    """
    if getattr(module, "initializes_itself", False):
        return
    if isinstance(module, nn.Linear):
        num_outputs, num_inputs = module.weight.shape
        nn.init.normal_(module.weight, std=sqrt(2 / (num_outputs + num_inputs)))
        if module.bias is not None:
            nn.init.normal_(module.bias, std=sqrt(1 / num_outputs))
    for child in module.children():
        initialize_classic(child)
