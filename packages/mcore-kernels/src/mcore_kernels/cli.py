"""The `mcore-kernels` command."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mcore_kernels.registry import Row
    from mcore_kernels.target import Target

_MARKS = {"chosen": "*", "available": "-", "refused": "x"}


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status.

    0 when done, 1 when the doctor finds a fault, 2 for a mistake of the user's (one line).
    """
    parser = argparse.ArgumentParser(
        prog="mcore-kernels", description="Operators, and why each one runs as it does."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "explain", help="per operator: what would run on a device, and why not the others"
    )
    _add_target(command)
    command.add_argument(
        "--arch", help="compute capability of a CUDA device that is not here, such as 9.0"
    )
    command.add_argument("--op", help="this operator only")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_explain)
    command = commands.add_parser(
        "bench", help="how near operators come to the limits of this machine, measured in one run"
    )
    _add_target(command)
    command.add_argument("--op", help="this operator only")
    command.add_argument("--every", action="store_true", help="all implementations that can run")
    command.add_argument("--tokens", type=int, help="rows (default: 16384 on cuda, else 2048)")
    command.add_argument("--hidden", type=int, help="columns (default: 4096 on cuda, else 1024)")
    command.add_argument("--repeats", type=int, default=15, help="of each call (default: 15)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    command.set_defaults(run=_bench, arch=None)
    command = commands.add_parser(
        "doctor", help="what is installed, and whether what would run here computes what it should"
    )
    _add_target(command)
    command.set_defaults(run=_doctor, arch=None)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except ValueError as error:
        print(f"mcore-kernels: {error}", file=sys.stderr)
        return 2


def _add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    command.add_argument("--dtype", help="of activations (default: bfloat16 on cuda, else float32)")
    command.add_argument("--head-dim", type=int, help="size of an attention head")


def _bench(args: argparse.Namespace) -> int:
    from mcore_kernels.bench.command import run_bench

    return run_bench(
        _target(args), op=args.op, tokens=args.tokens, hidden=args.hidden, repeats=args.repeats,
        every=args.every, out=args.json,
    )  # fmt: skip


def _doctor(args: argparse.Namespace) -> int:
    from mcore_kernels.bench.command import run_doctor

    return run_doctor(_target(args))


def _explain(args: argparse.Namespace) -> int:
    from mcore_kernels.registry import explain, operator_named

    target = _target(args)
    rows = explain(target)
    if args.op is not None:
        rows = [row for row in rows if row.op == operator_named(args.op).name]
    print(_json(target, rows) if args.json else _table(target, rows))
    return 0


def _target(args: argparse.Namespace) -> Target:
    import torch

    from mcore_kernels.target import Target

    device = args.device or ("cuda" if args.arch or torch.cuda.is_available() else "cpu")
    dtype = _dtype(args.dtype or ("bfloat16" if device.startswith("cuda") else "float32"))
    if args.arch is not None:
        if device != "cuda":
            raise ValueError(f"--arch describes a CUDA device, not --device {device}")
        return Target(
            device_type="cuda", arch=_arch(args.arch), dtype=dtype, head_dim=args.head_dim
        )
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("no CUDA device here; --arch 9.0 describes one that is elsewhere")
    try:
        return Target.of(device, dtype=dtype, head_dim=args.head_dim)
    except RuntimeError as error:  # torch's word on a device that it cannot parse
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error


def _arch(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"--arch is a compute capability such as 9.0, got {text!r}")
    return int(major), int(minor)


def _dtype(name: str) -> torch.dtype:
    import torch

    from mcore_kernels.registry import nearest

    names = ("float32", "bfloat16", "float16", "float64")
    if name not in names:
        raise ValueError(f"--dtype {name!r}: {nearest(name, names)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _json(target: Target, rows: list[Row]) -> str:
    operators: dict[str, dict[str, object]] = {}
    for row in rows:
        one = operators.setdefault(row.op, {"chosen": None, "implementations": []})
        if row.status == "chosen":
            one["chosen"] = row.name
        entries = one["implementations"]
        assert isinstance(entries, list)
        entries.append(
            {
                "name": row.name,
                "status": row.status,
                "reason": row.reason,
                "priority": row.priority,
                "summary": row.summary,
            }
        )
    described = {
        "device": target.device_type,
        "arch": None if target.arch is None else list(target.arch),
        "dtype": str(target.dtype).removeprefix("torch."),
        "head_dim": target.head_dim,
    }
    return json.dumps({"target": described, "operators": operators}, indent=2)


def _table(target: Target, rows: list[Row]) -> str:
    lines = [f"on {target.describe()}   (* runs, - could be asked for by name, x cannot run)"]
    width = max(len(row.name) for row in rows)
    previous = ""
    for row in rows:
        if row.op != previous:
            lines.append(f"{row.op}")
        previous = row.op
        lines.append(
            f"  {_MARKS[row.status]} {row.name:<{width}}  {row.summary}\n"
            f"    {'':<{width}}  {row.reason}"
        )
    return "\n".join(lines)
