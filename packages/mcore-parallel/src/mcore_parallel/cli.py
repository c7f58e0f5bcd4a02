"""The `mcore-parallel` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_parallel.config import ParallelConfig

_AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
_GROUPS = (*_AXES, "dp_cp", "replica", "embedding", "world")
_SHOWN = 8  # ranks of a group in the overview


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status.

    0 when done, 2 for a mistake of the user's, which prints one line.
    """
    args = _parser().parse_args(argv)
    try:
        return _layout(args)
    except ValueError as error:
        print(f"mcore-parallel: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-parallel", description="Parallel layouts, before any process is started."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    layout = commands.add_parser(
        "layout",
        help="groups and coordinates of every rank of a layout",
        description="Check a layout and print the groups and the coordinates of its ranks.",
    )
    add = layout.add_argument
    add("--world", type=int, required=True, metavar="N", help="number of ranks")
    add("--tp", type=int, default=1, help="tensor parallel size (default 1)")
    add("--cp", type=int, default=1, help="context parallel size (default 1)")
    add("--pp", type=int, default=1, help="pipeline parallel size (default 1)")
    add("--dp", type=int, help="data parallel size (default: what the world leaves)")
    add("--ep", type=int, default=1, help="expert parallel size (default 1)")
    add("--etp", type=int, help="tensor parallel size of experts (default: as --tp)")
    add("--sequence-parallel", action="store_true", help="cut activations along the sequence")
    add("--order", help="axes, fastest varying first (default tp-cp-ep-dp-pp)")
    add("--layers", type=int, metavar="N", help="also show which layers each stage holds")
    add("--stage-layers", metavar="A,B,…", help="layers of each pipeline stage (default: even)")
    add("--seq-length", type=int, metavar="S", help="also check that ranks can share S tokens")
    add("--rank", type=int, metavar="R", help="only this rank, with the members of its groups")
    add("--json", action="store_true", help="print JSON")
    return parser


def _layout(args: argparse.Namespace) -> int:
    from mcore_parallel.config import check_sequence
    from mcore_parallel.stages import stage_layers

    config = _config(args).resolve(args.world)
    if args.seq_length is not None:
        check_sequence(config, args.seq_length)
    found: dict[str, Any] = {"layout": config.describe(), "world_size": args.world}
    if args.layers is not None:
        stages = stage_layers(args.layers, config.pp, config.stage_layers)
        found["stage_layers"] = [list(stage) for stage in stages]
    if args.rank is None:
        found.update(_all_ranks(config))
    else:
        found.update(_one_rank(config, args.world, args.rank))
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(_lines(found)))
    sys.stdout.flush()
    return 0


def _config(args: argparse.Namespace) -> ParallelConfig:
    from mcore_parallel.config import ParallelConfig

    counts = None
    if args.stage_layers is not None:
        try:
            counts = tuple(int(count) for count in args.stage_layers.split(","))
        except ValueError:
            raise ValueError(
                f"--stage-layers {args.stage_layers!r} is not of the form 8,8,7,7"
            ) from None
        if args.layers is None:
            raise ValueError(f"--stage-layers needs --layers (these sum to {sum(counts)})")
    order = {} if args.order is None else {"order": args.order}
    return ParallelConfig(
        tp=args.tp,
        cp=args.cp,
        pp=args.pp,
        dp=args.dp,
        ep=args.ep,
        etp=args.etp,
        sequence_parallel=args.sequence_parallel,
        stage_layers=counts,
        **order,
    )


def _all_ranks(config: ParallelConfig) -> dict[str, Any]:
    dense, expert = config.dense_view(), config.expert_view()
    columns = {**dense.table(), **expert.table()}
    axes = []
    for axis in _AXES:
        view = dense if axis in dense.axes else expert
        size, stride = view.size(axis), view.stride(axis)
        first = list(view.members(0, [axis]))
        axes.append(
            {
                "axis": axis,
                "size": size,
                "groups": view.world_size // size,
                "spacing": stride,
                "first": first,
            }
        )
    return {"axes": axes, "ranks": {axis: columns[axis].tolist() for axis in _AXES}}


def _one_rank(config: ParallelConfig, world_size: int, rank: int) -> dict[str, Any]:
    from mcore_parallel.mesh import ParallelMesh

    mesh = ParallelMesh.arithmetic(config, world_size=world_size, rank=rank)
    groups = {name: list(getattr(mesh, name).ranks) for name in _GROUPS}
    return {"rank": rank, "coords": mesh.coords, "groups": groups}


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['layout']} over {found['world_size']} ranks"]
    for stage, layers in enumerate(found.get("stage_layers", [])):
        held = f"layers {layers[0]}-{layers[-1]} ({len(layers)})" if layers else "no layers"
        lines.append(f"stage {stage}: {held}")
    if "rank" in found:
        lines += ["", f"rank {found['rank']}"]
        lines.append(" ".join(f"{axis}={place}" for axis, place in found["coords"].items()))
        lines += ["", f"{'group':<10}{'size':>6}  ranks"]
        for name, ranks in found["groups"].items():
            lines.append(f"{name:<10}{len(ranks):>6}  {' '.join(map(str, ranks))}")
        return lines
    lines += ["", f"{'axis':<5}{'size':>7}{'groups':>8}{'spacing':>9}  group of rank 0"]
    for row in found["axes"]:
        first = " ".join(map(str, row["first"][:_SHOWN])) + " …" * (len(row["first"]) > _SHOWN)
        numbers = f"{row['size']:>7}{row['groups']:>8}{row['spacing']:>9}"
        lines.append(f"{row['axis']:<5}{numbers}  {first}")
    lines += ["", f"{'rank':>7}" + "".join(f"{axis:>6}" for axis in _AXES)]
    columns = [found["ranks"][axis] for axis in _AXES]
    for rank, place in enumerate(zip(*columns, strict=True)):
        lines.append(f"{rank:>7}" + "".join(f"{value:>6}" for value in place))
    return lines
