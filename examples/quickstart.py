"""Builds a DLRM, trains it on a budget of fast memory, evaluates it, saves and loads it.

    python examples/quickstart.py

It needs no data and no GPU, and takes a few seconds.
"""

from __future__ import annotations

import torch

import recsys
from recsys.datasets import BatchLoader, SyntheticCriteo
from recsys.embeddings import Adagrad, HotColdEmbeddingBagCollection, TableConfig
from recsys.pipeline import TrainPipeline


def build(data: SyntheticCriteo, budget: str | None) -> recsys.DLRMTrain:
    """A DLRM with a table per feature; `budget` is the fast memory for rows, None for all rows."""
    tables = [
        TableConfig(name=f"t_{name}", num_embeddings=size, embedding_dim=16, feature_names=(name,))
        for name, size in data.table_sizes.items()
    ]
    bags = HotColdEmbeddingBagCollection(tables, optimizer=Adagrad(lr=0.05), budget=budget)
    return recsys.DLRMTrain(recsys.DLRM(bags, data.num_dense, [64, 16], [64, 1]))


@torch.no_grad()
def auc_of(model: recsys.DLRMTrain, data: SyntheticCriteo) -> float:
    """The share of pairs of a click and another sample in which the click has the higher logit."""
    batches = list(BatchLoader(data, "test", 4096, shuffle=False))
    logits = torch.cat([model(batch)[1][1] for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    clicks, others = logits[labels == 1], logits[labels == 0].sort().values
    return torch.searchsorted(others, clicks).double().mean().item() / len(others)


def main(num_samples: int = 140_000, file: str = "quickstart.pt") -> None:
    torch.manual_seed(0)
    sizes = [10, 100, 1_000, 10_000, 50_000] * 4
    data = SyntheticCriteo(num_samples=num_samples, table_sizes=sizes)
    model = build(data, budget="4MiB")
    dense = [weight for name, weight in model.named_parameters() if "embedding" not in name]
    pipeline = TrainPipeline(model, torch.optim.Adagrad(dense, lr=0.05))  # fetches rows ahead
    loader = BatchLoader(data, "train", batch_size=256, shuffle=True)
    for step, (loss, _) in enumerate(pipeline.steps(loader), 1):
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.3f}")
    print(f"test AUC {auc_of(model, data):.4f}")
    bags = model.model.sparse_arch.embedding_bag_collection
    all_mib = sum(sizes) * 16 * 2 * 4 / 2**20  # rows and state of Adagrad, float32
    hits = f"{bags.hit_rates.lookups:.0%} of the lookups found their row"
    print(f"{hits} in 4 MiB of fast memory; all rows take {all_mib:.0f} MiB")

    torch.save(model.state_dict(), file)  # ordinary, with the keys of TorchRec's DLRM
    loaded = build(data, budget=None)  # every row in fast memory
    loaded.load_state_dict(torch.load(file))
    print(f"test AUC {auc_of(loaded, data):.4f}, loaded from {file}")


if __name__ == "__main__":
    main()
