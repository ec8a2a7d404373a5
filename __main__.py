"""`python -m dewconv`, and the `dewconv` command."""

from __future__ import annotations

import sys


def main() -> None:
    from .signals import end_at_once

    end_at_once()
    from .streams import open_streams

    open_streams()
    from .cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
