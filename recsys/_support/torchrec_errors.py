"""What is wrong if TorchRec cannot be imported, and what to install.

TorchRec imports FBGEMM. A release of FBGEMM loads only beside the release of torch that it was
built for; beside another one its import raises OSError, and not ImportError.
"""

from __future__ import annotations

import torch

from recsys.errors import MissingDependency

__all__ = ["cannot_import_torchrec"]


def cannot_import_torchrec(user: str, error: ImportError | OSError) -> MissingDependency:
    """The error for `user`, which needs TorchRec, if importing it raised `error`."""
    if isinstance(error, ImportError):
        return MissingDependency(
            f"{user} needs TorchRec, which is not installed ({error}); install it by "
            "pip install 'recsys[torchrec]'"
        )
    return MissingDependency(
        f"{user} needs TorchRec, and its FBGEMM does not load beside torch {torch.__version__} "
        f"({error}); install releases of torch, torchrec and fbgemm-gpu that belong together: "
        "README, 'Installing'"
    )
