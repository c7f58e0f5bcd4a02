"""Check that every package declares what it imports, and imports what it declares (deptry).

python tools/deps.py            # all packages of this checkout
python tools/deps.py --root DIR # of another checkout
"""

import argparse
import subprocess
import sys
from pathlib import Path

# Declared for what they bring at run time, not imported by name: torch imports tensorboard for
# mcore-train, and warns without numpy.
UNIMPORTED = {
    "mcore-kernels": ("numpy",),
    "mcore-train": ("tensorboard",),
}


def check(package: Path) -> int:
    """Run deptry over one package folder and return its exit status."""
    command = [sys.executable, "-m", "deptry", "src", "--no-ansi"]
    roots = sorted(p.name.replace("-", "_") for p in package.parent.iterdir() if p.is_dir())
    mapping = (
        ",".join(f"{root.replace('_', '-')}={root}" for root in roots)
        + ",pyyaml=yaml,flash-attn-4=flash_attn"
    )
    command += ["--package-module-name-map", mapping]
    if package.name in UNIMPORTED:
        command += ["--per-rule-ignores", "DEP002=" + "|".join(UNIMPORTED[package.name])]
    return subprocess.run(command, cwd=package, check=False).returncode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args(argv).root
    return max(check(package) for package in sorted((root / "packages").glob("mcore-*")))


if __name__ == "__main__":
    raise SystemExit(main())
