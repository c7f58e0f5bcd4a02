"""Lock the workspace, then take every download address out of `uv.lock`.

The committed lock pins versions and hashes, but names no index and no file address: it works
from whatever index (or mirror) the user has configured:

* `registry = "<address>"` becomes `registry = "index"`, a neutral relative name;
* `url = "<address>/NAME"` becomes `path = "NAME"`;
* the `[package.metadata]` tables go, so that uv resolves again with the pins as preferences.

`uv sync` and `uv run` therefore rewrite the file in the work tree: never commit what they leave.

    python tools/lock.py            # resolve, keeping the committed pins where they still fit
    python tools/lock.py --upgrade  # newest versions that the constraints allow
    git show HEAD:uv.lock | python tools/lock.py --check -   # fail when it names an address
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "uv.lock"


def neutral(text: str) -> str:
    """Return the lock `text` without registry and file addresses and without metadata tables."""
    text = re.sub(r'registry = "[^"]*"', 'registry = "index"', text)
    text = re.sub(r'url = "[^"]*/([^"/]+)"', r'path = "\1"', text)
    kept: list[str] = []
    dropping = False
    for line in text.splitlines(keepends=True):
        if line.startswith("["):
            dropping = line.startswith("[package.metadata")
        if not dropping:
            kept.append(line)
    return "".join(kept)


def addresses(text: str) -> list[str]:
    """Return the lines of a lock that name a download address."""
    return [line for line in text.splitlines() if "://" in line]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest allowed versions")
    parser.add_argument("--check", metavar="FILE", help="only look for addresses ('-': stdin)")
    args = parser.parse_args(argv)
    if args.check:
        text = sys.stdin.read() if args.check == "-" else Path(args.check).read_text()
        found = addresses(text)
        for line in found[:3]:
            print(f"uv.lock names an address: {line.strip()[:100]}", file=sys.stderr)
        return 1 if found else 0
    command = ["uv", "lock", *(["--upgrade"] if args.upgrade else [])]
    subprocess.run(command, cwd=ROOT, check=True)
    LOCK.write_text(neutral(LOCK.read_text()))
    print(f"{LOCK.name}: {LOCK.read_text().count('[[package]]')} packages, no address")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
