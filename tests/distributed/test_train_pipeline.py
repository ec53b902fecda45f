"""The pipeline over TorchRec's sharded collections, without ranks."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("torchrec")

from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from recsys.distributed import HotColdTrainPipelineSparseDist, train_pipeline


def test_ids_are_waited_for_and_prefetched_on_the_stream_of_their_exchange(monkeypatch):
    """Their memory belongs to it; TorchRec's forward waits for it, and not for another."""
    streams, found = [], []

    @contextmanager
    def stream_context(stream):
        streams.append(stream)
        yield
        streams.pop()

    class Tables:
        forward = SimpleNamespace(name="tables")

        def prefetch(self, ids, ctx):
            found.append((ids, ctx, *streams))

    class Request:
        def wait(self):
            found.append(("wait", *streams))
            return "ids"

    monkeypatch.setattr(train_pipeline, "AbstractShardedTables", Tables)
    monkeypatch.setattr(TrainPipelineSparseDist, "wait_sparse_data_dist", lambda *_: None)
    pipeline = HotColdTrainPipelineSparseDist.__new__(HotColdTrainPipelineSparseDist)
    pipeline._stream_context, pipeline._data_dist_stream = stream_context, "exchange"
    pipeline._pipelined_modules = [Tables()]
    context = SimpleNamespace(
        input_dist_tensors_requests={"tables": Request()}, module_contexts={"tables": "context"}
    )

    pipeline.wait_sparse_data_dist(context)

    assert found == [("wait", "exchange"), ("ids", "context", "exchange")]
    assert context.input_dist_tensors_requests["tables"].wait() == "ids"
