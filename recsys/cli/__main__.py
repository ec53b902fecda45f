"""`python -m recsys.cli`."""

from recsys.cli.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
