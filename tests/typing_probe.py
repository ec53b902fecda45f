"""Checked by mypy, never run: the public surface as a typed program uses it."""

from typing import Any, assert_type

import torch

import recsys
from recsys.config import OptimizerConfig, TrainConfig, load_config
from recsys.conversion.accelerate import Accelerated
from recsys.conversion.estimate import Estimate
from recsys.conversion.verify import Verification
from recsys.datasets import BatchLoader, SampleSource, Store, SyntheticCriteo
from recsys.embeddings import HotPlan, PopularityProfile, TableConfig, plan_hot_rows
from recsys.embeddings.popularity.counts import Coverage
from recsys.train.build import build_embeddings
from recsys.train.evaluate import evaluate_run

sources: list[SampleSource] = [SyntheticCriteo(num_samples=7), Store("store")]
for batch in BatchLoader(sources[0], "train", 128, shuffle=True):
    assert_type(batch, recsys.Batch)
    assert_type(batch.sparse_features.values(), torch.Tensor)

table = TableConfig(name="t", num_embeddings=1, embedding_dim=4)
embeddings, row_optimizer = build_embeddings("torch", [table], OptimizerConfig(lr=0.1))
assert_type(row_optimizer, torch.optim.Optimizer)
model = recsys.DLRMTrain(recsys.DLRM(embeddings, 13, [8, 4], [8, 1]))

assert_type(load_config(None, ["seed=1"], data="store"), TrainConfig)
assert_type(evaluate_run("run")[0], dict[str, dict[str, Any]])
assert_type(recsys.accelerate(model, optimizer=row_optimizer, always=True), Accelerated)
assert_type(recsys.verify(model, [], loss=lambda m, b: m(b), optimizer=row_optimizer), Verification)

profile = PopularityProfile.count(sources[0], range(3))
assert_type(profile, PopularityProfile)
assert_type(profile.coverage(10, sources[0], range(3, 7)), Coverage)
assert_type(profile.coverage(10, [batch, batch.sparse_features]), Coverage)
assert_type(plan_hot_rows(profile, [table], "1MiB"), HotPlan)
recsys.accelerate(model, plan=plan_hot_rows(profile, [table], "1MiB"))
assert_type(recsys.estimate(model, "1MiB", optimizer=row_optimizer), Estimate)
