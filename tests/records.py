"""Records of what tools found, as files of JSON in `benchmarks/results`."""

from recsys._support.machine import describe_environment
from recsys.train.run_folder import write_json


def write_record(file, command, **found):
    """Write what a command found, and the machine on which it ran."""
    write_json(file, {"command": command, "environment": describe_environment(), **found})
