"""`python -m recsys`: the command line."""

from recsys.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
