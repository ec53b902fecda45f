"""Checks that the figures of the newest release were measured on its code.

The release is the newest commit with a subject such as `release: 0.1.0`. Nothing in `recsys/` but
the version may differ between it and the commits that its records name. A shallow clone lacks the
history, so nothing is compared there.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDS = ("lookup", "step", "models", "tiers", "frameworks", "time_to_auc")


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def main():
    release = git("log", "-1", "--grep=^release: ", "--format=%H").strip()
    is_shallow = git("rev-parse", "--is-shallow-repository").strip() == "true"
    wrong = []
    for name in RECORDS if release and not is_shallow else ():
        record = json.loads(git("show", f"{release}:benchmarks/results/{name}.json"))
        measured = record["environment"]["commit"]
        compared = "diff", "--name-only", measured, release, "--", "recsys", ":!recsys/_version.py"
        if changed := git(*compared).split():
            wrong.append(f"{name}.json is of {measured[:8]}; since then {changed} changed")
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
