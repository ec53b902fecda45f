import numpy as np
import pytest
import torch

from recsys.config import load_config
from recsys.datasets.criteo.prepare import prepare_criteo_1tb
from recsys.errors import ConfigError
from recsys.train.parts.build import build_loader, choose_plan, open_source


def test_a_last_day_too_short_to_halve_is_what_is_said_to_be_wrong(raw_line, tmp_path):
    days = [tmp_path / "day_0", tmp_path / "day_1"]
    for day, num_lines in zip(days, (101, 1), strict=True):
        day.write_text(f"{raw_line()}\n" * num_lines)
    prepare_criteo_1tb(days, tmp_path / "store", show_progress=False)

    with pytest.raises(ConfigError) as caught:
        open_source(load_config(data=str(tmp_path / "store")))

    assert str(caught.value) == (
        f"{tmp_path / 'store'}: the validation part is empty: of 102 samples, train has 101, "
        "test has 1, validation has 0; a store of several days needs 2 samples or more in its last "
        "day and one before it, any other data 14 or more"
    )


def test_a_plan_that_does_not_exist_names_the_key(small_config):
    config = small_config("plan=nosuch.npz", "budget=1MiB")

    with pytest.raises(ConfigError, match=r"plan: there is no file nosuch\.npz; make it with"):
        choose_plan(config, open_source(config))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_may_train_in_the_order_of_the_data(small_config, shuffle):
    config = small_config(f"shuffle={str(shuffle).lower()}", "seed=3")
    source = open_source(config)
    expected = source.read(np.arange(len(source.splits["train"])))

    for _ in range(2):  # epochs
        batches = list(build_loader(config, source, None))

        found = torch.cat([batch.dense_features for batch in batches])
        assert torch.equal(found, expected.dense_features) == (not shuffle)


def test_an_order_of_the_data_and_that_of_fae_are_refused_together(small_config):
    with pytest.raises(ConfigError, match="shuffle false is not for schedule 'fae'"):
        small_config("shuffle=false", "schedule.name=fae", "budget=1MiB")


def test_a_table_with_an_empty_part_is_told_to_change_its_split(table_store):
    data = table_store(num_samples=8)

    with pytest.raises(ConfigError) as caught:
        open_source(load_config(data=str(data)))

    assert str(caught.value) == (
        f"{data}: the validation part is empty: of 8 samples, train has 7, test has 1, validation "
        "has 0; training needs samples in each part; change [split] in the schema, and prepare the "
        "table with it again"
    )
