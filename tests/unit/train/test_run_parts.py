"""Runs beside their parts: FAE's order of samples, and what the budget of a policy pays for."""

import pytest
import torch

from recsys.embeddings import StalenessTracker
from recsys.embeddings.tables_module import groups_of
from recsys.embeddings.tiers.budget import SpaceSize, map_bytes
from recsys.pipeline.model_tables import ModelTables
from recsys.pipeline.skip.paper import PaperClassifier
from recsys.train.build import (
    autocast,
    build_loader,
    build_model,
    choose_plan,
    open_source,
    row_optimizer,
)
from tests.train.resumed_runs import load_model, run
from tests.train.test_trainer_skip import skip_config  # noqa: F401  # a fixture

WINDOW = ("synthetic.table_sizes=[9, 7, 1, 900]", "budget=24KiB", "schedule.lookahead.depth=3")


def fast_memory_of(model, config):
    """Bytes of row maps and slots; the tables of the model must have slots."""
    formula, found = row_optimizer(config.optimizer), 0
    for group in groups_of(model):
        assert group.num_slots
        space = SpaceSize.of(group.tables, formula.state_sizes(group.dim))
        found += map_bytes(space.num_rows) + group.num_slots * space.slot_bytes
    return found


def test_the_budget_pays_for_the_tracker(skip_config):  # noqa: F811
    config = skip_config("drop_input", *WINDOW)
    model, _ = build_model(config, open_source(config))
    tracker = StalenessTracker(model, config.skip.settings(0).staleness)

    assert 0 <= 24 * 1024 - fast_memory_of(model, config) - tracker.num_bytes < 100


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_the_budget_pays_for_the_snapshot(skip_config, optimizer):  # noqa: F811
    config = skip_config("paper", f"optimizer.name={optimizer}")
    source = open_source(config)
    plan = choose_plan(config, source)
    model, _ = build_model(config, source, plan)
    tables = ModelTables(model, None)
    classifier = PaperClassifier(config.skip.settings(0), model, tables, "skip", 0)

    assert 0 < plan.num_pinned == len(classifier._hot_rows)
    assert fast_memory_of(model, config) + classifier.num_bytes <= 24 * 1024


def test_a_run_of_fae_is_a_plain_one_over_the_samples_in_its_order(small_config, tmp_path):
    plain = ("optimizer.name=adagrad", "batch_size=16", "num_threads=1")
    fae = ("schedule.fae.adaptive=false", "schedule.fae.rate=20", "budget='6000'")
    config = small_config(*plain, *fae, "epochs=2")
    record = run(config, tmp_path / "fae")
    source = open_source(config)
    loader = build_loader(config, source, choose_plan(config, source))
    model, optimizers = build_model(small_config(*plain), source)

    for _ in range(2):
        for batch in loader:
            loss, _ = model(batch)
            for each in optimizers:
                each.zero_grad()
            (loss * (len(batch) / 16)).backward()
            for each in optimizers:
                each.step()

    assert 0 < record["schedule"]["hot_sample_share"] < 1
    assert record["tiers"]["fetched_bytes"] > 0
    found = load_model(tmp_path / "fae")
    for name, expected in model.model.state_dict().items():
        assert torch.equal(found[name], expected), name


def test_bf16_ranks_samples_by_float32_logits(small_config):
    config = small_config("precision=bf16")
    source = open_source(config)
    model, _ = build_model(config, source)

    with autocast(config):
        _, (_, logits, _) = model(next(iter(build_loader(config, source, None))))

    assert logits.dtype == torch.float32
    assert len(torch.unique(logits)) > 100
