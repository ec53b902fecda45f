"""Finds the files of rows that this process has open; they have no names."""

import os
from pathlib import Path


def scratch_files(folder):
    """The descriptors of the files in a folder that have no name there."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)  # noqa: PTH115  # its end is text of the system
        except FileNotFoundError:  # of the loop itself
            continue
        if target.startswith(f"{folder}/") and target.endswith(" (deleted)"):
            found.append(int(link.name))
    return found


def scratch_bytes(folder):
    """Bytes of these files."""
    return sum(os.fstat(descriptor).st_size for descriptor in scratch_files(folder))
