"""`python -m dewconv`, and the `dewconv` command."""

from __future__ import annotations

import sys


def main() -> None:
    from .cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
