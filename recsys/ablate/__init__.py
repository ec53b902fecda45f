"""Ablations: one configuration in variations, each trained with several seeds."""

from recsys.ablate.run import ablate

__all__ = ["ablate"]
