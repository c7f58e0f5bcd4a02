"""The `mcore-data` command."""

import argparse
import sys
from collections.abc import Sequence

from mcore_data.commands import bench, files, preferences, samples, text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-data", description="Prepare and inspect training corpora."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (text, preferences, files, samples, bench):
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status.

    What a user can set right (ValueError, OSError, IndexError) ends as one line on standard
    error and status 2.
    """
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except (ValueError, OSError, IndexError) as error:
        print(f"mcore-data: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mcore-data: interrupted, nothing was written", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
