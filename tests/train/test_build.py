import numpy as np
import pytest
import torch

from recsys.train.build import build_loader, open_source


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_may_train_in_the_order_of_the_data(small_config, shuffle):
    config = small_config(f"shuffle={str(shuffle).lower()}", "seed=3")
    source = open_source(config)
    expected = source.read(np.arange(len(source.splits["train"])))

    for _ in range(2):  # epochs
        batches = list(build_loader(config, source, None))

        found = torch.cat([batch.dense_features for batch in batches])
        assert torch.equal(found, expected.dense_features) == (not shuffle)
