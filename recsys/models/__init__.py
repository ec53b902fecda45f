"""Models over pooled embeddings."""

from recsys.models.dlrm import DLRM, DLRMTrain

__all__ = ["DLRM", "DLRMTrain"]
