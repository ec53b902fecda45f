"""What recsys expects of the private parts of torch; one that changes fails here, by its name."""

import re
from pathlib import Path

from torch import nn

from recsys._support import torch_compat
from recsys._support.torch_compat import (
    MODULE_HOOKS,
)


def test_these_are_all_the_hooks_that_a_module_has():
    module = nn.Linear(1, 1)

    found = {name for name in module.__dict__ if "hook" in name}

    assert found == set(MODULE_HOOKS)


PRIVATE = re.compile(
    r"torch\._C\b|_execution_engine|(?<!recsys)\._version\b|getattr_static\(\s*torch"
    r"|_global_optimizer_|_active_ddp_module|super\(torch\.autograd|mkldnn\._"
    r"|_post_accumulate_grad_hooks\b|torch\._foreach_"
)


def test_no_other_module_of_recsys_names_them():
    files = Path(torch_compat.__file__).parents[1].rglob("*.py")

    found = [
        f"{file}: {private[0]}"
        for file in files
        if file.name != "torch_compat.py"
        for private in PRIVATE.finditer(file.read_text())
    ]

    assert found == []
