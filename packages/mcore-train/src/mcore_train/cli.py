"""The `mcore-train` command."""

import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status."""
    raise SystemExit(f"mcore-train: no commands yet {argv or sys.argv[1:]}")
