"""Training pipelines: fetch rows for later mini-batches while the current one computes.

    schedule            Sequential, LookAhead, Hotline: settings that say what runs when
    auto                Auto: measures several schedules, continues with the fastest
    train_pipeline      TrainPipeline.progress: one step of training
    window              mini-batches taken ahead, by iterator
    take                takes the next one, and finds out whether it overwrites those that wait
    optimizers          the optimizers that a pipeline steps
    model_tables        which module will look up which ids of a mini-batch, and its claims
    hotline             divides a mini-batch into popular samples and the others
    micro_batches       selects samples of a mini-batch, joins the outputs of parts
    loss_and_output     checks what a model returned, and says why a loss is nan or inf
    tiers_state         hit counters, for checkpoints
    stalls              where the time went, stage by stage

Results are the same under each schedule (Hotline: up to float summation order). FAE, in contrast,
changes the order of samples:

    fae                 finds the samples whose rows are all pinned, and loads them in turns

`TrainPipeline(..., skip=policy)` leaves out what has stopped changing:

    policies            what is left out: samples, updates of rows, or nothing (Observe)
    importance          what Importance keeps of a mini-batch, by a small model that predicts labels
    refill              mini-batches of full size from the samples that are kept
    guard               lowers or stops skipping when predictions get worse
    skipping            a policy at work in a pipeline
    paper               Slipstream's published code as a policy
"""

from typing import TYPE_CHECKING

from recsys._support.lazy_names import lazy_names

if TYPE_CHECKING:
    from recsys.pipeline.auto import Auto
    from recsys.pipeline.fae import FAE, HotColdLoader
    from recsys.pipeline.schedule import Hotline, LookAhead, Sequential
    from recsys.pipeline.skip.policies import (
        DropInput,
        FreezeRows,
        Guard,
        Importance,
        Observe,
        Paper,
        RandomDrop,
        Subsample,
    )
    from recsys.pipeline.train_pipeline import TrainPipeline

__all__ = [
    "FAE",
    "Auto",
    "DropInput",
    "FreezeRows",
    "Guard",
    "HotColdLoader",
    "Hotline",
    "Importance",
    "LookAhead",
    "Observe",
    "Paper",
    "RandomDrop",
    "Sequential",
    "Subsample",
    "TrainPipeline",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "FAE": "fae",
            "Auto": "auto",
            "DropInput": "skip.policies",
            "FreezeRows": "skip.policies",
            "Guard": "skip.policies",
            "HotColdLoader": "fae",
            "Hotline": "schedule",
            "Importance": "skip.policies",
            "LookAhead": "schedule",
            "Observe": "skip.policies",
            "Paper": "skip.policies",
            "RandomDrop": "skip.policies",
            "Sequential": "schedule",
            "Subsample": "skip.policies",
            "TrainPipeline": "train_pipeline",
        },
    )
