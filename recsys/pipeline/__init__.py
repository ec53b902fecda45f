"""What runs when: rows of mini-batches to come are fetched while others are computed on.

    schedule            Sequential, LookAhead, Hotline: values that say what runs when
    auto                Auto: measures some, and goes on with the fastest
    train_pipeline      TrainPipeline.progress: one step of training
    window              mini-batches that were taken ahead, by iterator
    inputs              which module will look up which ids of a mini-batch
    popular_split       Hotline's parts of a mini-batch; micro_batches: how it is taken apart;
                        loss_parts: how their losses make up the whole's
    stalls              where the time went; timeline: the same to be looked at
    suggestions         settings that would shorten it

No schedule changes a number. FAE changes the order of samples instead:

    hot_samples         which samples' rows are all pinned
    shuffle_scheduler   how long training stays with cold samples, then with hot ones
    hot_cold_loader     their mini-batches
"""

from recsys.pipeline.auto import Auto
from recsys.pipeline.hot_cold_loader import HotColdLoader
from recsys.pipeline.schedule import Hotline, LookAhead, Sequential
from recsys.pipeline.shuffle_scheduler import FAE
from recsys.pipeline.train_pipeline import TrainPipeline

__all__ = [
    "FAE",
    "Auto",
    "HotColdLoader",
    "Hotline",
    "LookAhead",
    "Sequential",
    "TrainPipeline",
]
