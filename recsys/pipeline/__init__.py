"""Training pipelines: fetch rows for later mini-batches while the current one computes.

    schedule            Sequential, LookAhead, Hotline: settings that say what runs when
    auto                Auto: measures several schedules, continues with the fastest
    train_pipeline      TrainPipeline.progress: one step of training
    window              mini-batches taken ahead, by iterator
    inputs              which module will look up which ids of a mini-batch
    popular_split       Hotline: divides a mini-batch into popular samples and the others
    micro_batches       selects samples of a mini-batch, joins the outputs of parts
    loss_parts          whether the loss of a mini-batch is the mean or the sum of its parts' losses
    stalls              where the time went, stage by stage; timeline: the same as a trace
    suggestions         which settings would reduce waiting, and by how much

Results are the same under each schedule (Hotline: up to float summation order). FAE, in contrast,
changes the order of samples:

    hot_samples         finds the samples whose rows are all pinned
    shuffle_scheduler   decides how many cold and hot mini-batches make a turn
    hot_cold_loader     loads cold and hot mini-batches in turns
"""

from recsys.pipeline.auto import Auto
from recsys.pipeline.fae.hot_cold_loader import HotColdLoader
from recsys.pipeline.fae.shuffle_scheduler import FAE
from recsys.pipeline.schedule import Hotline, LookAhead, Sequential
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
