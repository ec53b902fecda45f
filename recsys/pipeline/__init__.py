"""What runs when: rows of mini-batches to come are fetched while others are computed on.

    schedule         Sequential, LookAhead: values that say what runs when
    train_pipeline   TrainPipeline.progress: one step of training
    inputs           which module will look up which ids of a mini-batch
    stalls           where the time went; timeline: the same to be looked at

No schedule changes a number.
"""

from recsys.pipeline.schedule import LookAhead, Sequential
from recsys.pipeline.train_pipeline import TrainPipeline

__all__ = ["LookAhead", "Sequential", "TrainPipeline"]
