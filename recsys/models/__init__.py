"""Models over embeddings, and their loss.

linear, interaction    fast forms of a linear layer with its ReLU, and of the dot products
archs                  what models of pooled bags have: embeddings, bottom MLP, top MLP
dlrm                   dot products of all pairs, or another interaction
dcn_v2                 a cross network
deepfm                 a factorization machine
masked_transformer     MaskedTransformerArch, an interaction for DLRM
histories              jagged rows of histories: padded, or summed
din                    attention over a history
tbsm                   a small DLRM at each step of a history, and a layer over the steps
retrieval              models of a user's and an item's vector, and their softmax over items
two_tower              an MLP over the user's features
sasrec                 self-attention over a history
batch_train            the loss of a model of whole mini-batches
"""

from recsys.models.dcn_v2 import DCNv2
from recsys.models.deepfm import DeepFM
from recsys.models.din import DIN
from recsys.models.dlrm import DLRM, DLRMTrain
from recsys.models.histories import pad_left, sum_of_bags
from recsys.models.masked_transformer import MaskedTransformerArch
from recsys.models.retrieval import RetrievalTrain
from recsys.models.sasrec import SASRec
from recsys.models.tbsm import TBSM
from recsys.models.two_tower import TwoTower

__all__ = [
    "DIN",
    "DLRM",
    "TBSM",
    "DCNv2",
    "DLRMTrain",
    "DeepFM",
    "MaskedTransformerArch",
    "RetrievalTrain",
    "SASRec",
    "TwoTower",
    "pad_left",
    "sum_of_bags",
]
