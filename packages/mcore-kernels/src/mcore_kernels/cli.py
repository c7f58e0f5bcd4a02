"""The `mcore-kernels` command."""

import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status."""
    raise SystemExit(f"mcore-kernels: no commands yet {argv or sys.argv[1:]}")
