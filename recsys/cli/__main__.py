"""`python -m recsys.cli`."""

from recsys.cli.entry import main

if __name__ == "__main__":
    raise SystemExit(main())
