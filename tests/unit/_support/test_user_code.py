"""A warning names the first line outside recsys and torch."""

import pytest
import torch
from torch import nn

from recsys._support.user_code import warn_caller


def test_a_warning_names_the_line_of_the_caller():
    layer = nn.Identity()
    layer.register_forward_hook(torch.no_grad()(lambda *_: from_recsys()))
    of_recsys = {"warn_caller": warn_caller, "__name__": "recsys.some.module"}
    exec("def from_recsys():\n    warn_caller('told')", of_recsys)
    from_recsys = of_recsys["from_recsys"]

    with pytest.warns(UserWarning, match="told") as told:
        layer(torch.zeros(1))

    assert [each.filename for each in told] == [__file__]
