import time
from pathlib import Path

import pytest

from recsys.bench import predict
from recsys.bench.parts import process_memory

pytest.importorskip("pyarrow")


@pytest.mark.outside_ci
@pytest.mark.usefixtures("quick_workers")
def test_training_and_prediction_are_measured_for_both_tiers():
    rows = predict.bench_predict(num_samples=3000, num_rounds=1, batch_size=256, table_sizes=[50])

    measured = [
        ("train", "throughput", "samples/s"),
        ("predict", "throughput", "samples/s"),
        ("predict", "peak_memory", "bytes"),
        ("predict", "speed_over_training", "ratio"),
    ]
    assert [(row.provider, row.metric, row.unit) for row in rows] == measured * 2
    assert [row.case.split(",")[2] for row in rows[::4]] == ["tables=resident", "tables=file"]
    rates = {row.provider: row.median for row in rows if row.unit == "samples/s"}
    assert all(row.median > 0 for row in rows)
    assert rows[7].median == pytest.approx(rates["predict"] / rates["train"])


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux")
def test_memory_that_was_given_back_is_in_the_peak():
    memory = process_memory.AnonymousMemory()
    held = bytearray(b"1" * 2**26)
    time.sleep(0.2)
    del held

    assert memory.peak >= memory.at_start + 2**26
