"""Writes the fixtures: small checkpoints of megatron-core, and hashes of what was in memory.

python make_fixtures.py            where megatron-core 0.16.1 is installed, and einops
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))
from megatron_theirs import digest

FOLDER = Path(__file__).parent / "fixtures"
SMALL = {"hidden": 4, "heads": 2, "kv_heads": 2, "ffn": 4, "vocab": 8, "experts": 2, "moe_ffn": 4,
         "rng": False}  # fmt: skip


def main() -> None:
    """Run the oracle and zip what it has written."""
    cases = json.loads((FOLDER / "cases.json").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary)
        for script, sharded in (("oracle.py", False), ("fsdp_oracle.py", True)):
            theirs = [case for case in cases if (case.get("format") == "fsdp_dtensor") is sharded]
            (out / "cases.json").write_text(json.dumps([{**SMALL, **case} for case in theirs]))
            where = Path(__file__).with_name(script)
            subprocess.run([sys.executable, where, out / "cases.json", out], check=True)
        for path in out.glob("*.pt"):
            path.with_suffix(".json").write_text(json.dumps(_hashed(path)))
            path.unlink()
        for case in cases:
            with tarfile.open(FOLDER / f"{case['name']}.tar.xz", "w:xz", preset=9) as archive:
                for file in sorted(out.rglob("*")):
                    inside = file.relative_to(out)
                    if file.is_file() and inside.parts[0].split(".")[0] == case["name"]:
                        archive.add(file, inside)


def _hashed(path: Path) -> dict[str, Any]:
    place = torch.load(path, weights_only=True)
    held = {
        name: {
            kind: [str(value.dtype), digest(value)]
            for kind, value in values.items()
            if kind not in ("before", "grad")
        }
        for name, values in place["held"].items()
    }
    place["loss"] = None
    return {**place, "held": held}


if __name__ == "__main__":
    main()
