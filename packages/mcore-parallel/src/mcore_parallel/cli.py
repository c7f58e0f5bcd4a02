"""The `mcore-parallel` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_parallel.cost.command import (
    add_commands,
    cost_lines,
    run_cost,
    run_scaling,
    scaling_lines,
)

if TYPE_CHECKING:
    from mcore_parallel.config import ParallelConfig

_AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
_SHARES = ("dp_shard", "dp_copies", "edp_shard", "edp_copies")
_GROUPS = (*_AXES, "dp_cp", *_SHARES, "replica", "embedding", "world")
_SHOWN = 8  # ranks of a group in the overview
_CP_KIND = "attention over cp: ring, all-gather, all-to-all or two-level:N (default ring)"
_CHUNKS = "virtual stages on each stage (default: 2 for interleaved and zb-v, else 1)"


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status.

    0 when done, 2 for a mistake of the user's, which prints one line.
    """
    args = _parser().parse_args(argv)
    try:
        run, lines = _COMMANDS[args.command]
        found = run(args)
        print(json.dumps(found) if args.json else "\n".join(lines(found)))
        sys.stdout.flush()
        return 0
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
    add("--cp-kind", default="ring", metavar="KIND", help=_CP_KIND)
    add("--pp", type=int, default=1, help="pipeline parallel size (default 1)")
    add("--dp", type=int, help="data parallel size (default: what the world leaves)")
    add("--ep", type=int, default=1, help="expert parallel size (default 1)")
    add("--etp", type=int, help="tensor parallel size of experts (default: as --tp)")
    add("--sequence-parallel", action="store_true", help="cut activations along the sequence")
    add("--zero", type=int, default=1, metavar="N", help="sharding over dp, 0 to 3 (default 1)")
    add("--replicas", type=int, default=1, help="ranks that hold each share (default 1)")
    add("--order", help="axes, fastest varying first (default tp-cp-ep-dp-pp)")
    add("--layers", type=int, metavar="N", help="also show which layers each stage holds")
    add(
        "--stage-layers",
        metavar="A,B,…",
        help="layers of each virtual stage (default: even), or a layout such as 'Et*3|t*4|tL'",
    )
    add("--first-layers", type=int, metavar="N", help="layers of the first pipeline stage")
    add("--last-layers", type=int, metavar="N", help="layers of the last pipeline stage")
    add("--count-embedding", action="store_true", help="count the embedding as a layer")
    add("--count-loss", action="store_true", help="count the loss as a layer")
    add("--schedule", default="1f1b", help="pipeline schedule (default 1f1b)")
    add("--chunks", type=int, metavar="V", help=_CHUNKS)
    add("--seq-length", type=int, metavar="S", help="also check that ranks can share S tokens")
    add("--rank", type=int, metavar="R", help="only this rank, with the members of its groups")
    add("--json", action="store_true", help="print JSON")
    _add_schedule(commands)
    add_commands(commands)
    return parser


def _add_schedule(commands: Any) -> None:
    schedule = commands.add_parser(
        "schedule",
        help="a pipeline schedule as a picture and in numbers, or all of them compared",
        description="Simulate a pipeline schedule and draw it; without --kind compare all kinds.",
    )
    add = schedule.add_argument
    add("--kind", help="1f1b, gpipe, interleaved, zb-h1 or zb-v")
    add("--stages", type=int, required=True, metavar="P", help="pipeline stages")
    names = "--microbatches", "--micro-batches"  # the second as in mcore-train
    add(*names, type=int, required=True, metavar="M", help="micro-batches of a step")
    add("--chunks", type=int, metavar="V", help=_CHUNKS)
    add("--group", type=int, metavar="G", help="micro-batches that pass a chunk together")
    add("--forward", type=float, default=1.0, help="time of a stage's forward (default 1)")
    add("--backward", type=float, default=1.0, help="of its input gradients (default 1)")
    add("--weight", type=float, default=1.0, help="of its weight gradients (default 1)")
    add("--exchange", type=float, default=0.0, help="of tokens on their way (default 0)")
    add("--transfer", type=float, default=0.0, help="of a message (default 0)")
    add("--paired", action="store_true", help="forwards beside other micro-batches' backwards")
    add("--png", type=Path, metavar="FILE", help="draw into a file (needs matplotlib)")
    add("--json", action="store_true", help="print JSON")


def _layout(args: argparse.Namespace) -> dict[str, Any]:
    from mcore_parallel.config import check_sequence

    config = _config(args).resolve(args.world)
    if args.seq_length is not None:
        check_sequence(config, args.seq_length)
    found: dict[str, Any] = {"layout": config.describe(), "world_size": args.world}
    if args.layers is not None:
        line, placed = config.line, config.place_layers(args.layers)
        found["stage_layers"] = [
            [list(placed[line.position(stage, chunk)]) for chunk in range(line.num_chunks)]
            for stage in range(line.num_stages)
        ]
    if args.rank is None:
        found.update(_all_ranks(config))
    else:
        found.update(_one_rank(config, args.world, args.rank))
    return found


def _config(args: argparse.Namespace) -> ParallelConfig:
    from mcore_parallel.config import SHARDINGS, ParallelConfig

    if not 0 <= args.zero < len(SHARDINGS):
        raise ValueError(f"--zero {args.zero} is none of 0 ({SHARDINGS[0]}) to 3 ({SHARDINGS[-1]})")
    given = {
        "--stage-layers": args.stage_layers,
        "--first-layers": args.first_layers,
        "--last-layers": args.last_layers,
        "--count-embedding": args.count_embedding or None,
        "--count-loss": args.count_loss or None,
    }
    for option, value in given.items():
        if value is not None and args.layers is None:
            raise ValueError(f"{option} needs --layers, the number of layers to place")
    order = {} if args.order is None else {"order": args.order}
    return ParallelConfig(
        tp=args.tp,
        cp=args.cp,
        context_kind=args.cp_kind,
        pp=args.pp,
        dp=args.dp,
        ep=args.ep,
        etp=args.etp,
        sequence_parallel=args.sequence_parallel,
        sharding=SHARDINGS[args.zero],
        replicas=args.replicas,
        schedule=args.schedule,
        chunks=_default_chunks(args.schedule, args.chunks),
        stage_layers=_counts(args.stage_layers),
        first_stage_layers=args.first_layers,
        last_stage_layers=args.last_layers,
        count_embedding=args.count_embedding,
        count_loss=args.count_loss,
        **order,
    )


def _counts(text: str | None) -> tuple[int, ...] | None:
    from mcore_parallel.stages import StageLayout

    if text is None or "L" in text:
        return None if text is None else StageLayout.parse(text).layers
    try:
        return tuple(int(count) for count in text.split(","))
    except ValueError:
        raise ValueError(
            f"--stage-layers {text!r} is not of the form 8,8,7,7 or Et*8|t*8|t*7|t*7L"
        ) from None


def _default_chunks(kind: str, chunks: int | None) -> int:
    if chunks is not None:
        return chunks
    return 2 if kind in ("interleaved", "zb-v") else 1


def _all_ranks(config: ParallelConfig) -> dict[str, Any]:
    dense, expert = config.dense_view(), config.expert_view()
    columns = {**dense.table(), **expert.table()}
    axes: list[dict[str, Any]] = []

    def add(axis: str, first: list[int], spacing: int) -> None:
        size, groups = len(first), dense.world_size // len(first)
        row = {"axis": axis, "size": size, "groups": groups, "spacing": spacing, "first": first}
        axes.append(row)

    for axis in _AXES:
        view = dense if axis in dense.axes else expert
        first, spacing = list(view.members(0, [axis])), view.stride(axis)
        add(axis, first, spacing)
        for size in config.context_parts if axis == "cp" else ():
            add(f"cp_part/{size}", first[:size], spacing)
            add(f"cp_ring/{size}", first[::size], spacing * size)
    return {"axes": axes, "ranks": {axis: columns[axis].tolist() for axis in _AXES}}


def _one_rank(config: ParallelConfig, world_size: int, rank: int) -> dict[str, Any]:
    from mcore_parallel.mesh import ParallelMesh

    mesh = ParallelMesh.arithmetic(config, world_size=world_size, rank=rank)
    names = [name for name in _GROUPS if config.replicas > 1 or name not in _SHARES]
    groups = {name: list(getattr(mesh, name).ranks) for name in names}
    for size, levels in mesh.cp_levels.items():
        for name, group in zip(("cp_part", "cp_ring"), levels, strict=True):
            groups[f"{name}/{size}"] = list(group.ranks)
    return {"rank": rank, "coords": mesh.coords, "groups": groups}


def _layout_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{found['layout']} over {found['world_size']} ranks"]
    for stage, chunks in enumerate(found.get("stage_layers", [])):
        held = [f"layers {c[0]}-{c[-1]} ({len(c)})" if c else "no layers" for c in chunks]
        lines.append(f"stage {stage}: {', '.join(held)}")
    if "rank" in found:
        lines += ["", f"rank {found['rank']}"]
        lines.append(" ".join(f"{axis}={place}" for axis, place in found["coords"].items()))
        lines += ["", f"{'group':<10}{'size':>6}  ranks"]
        for name, ranks in found["groups"].items():
            lines.append(f"{name:<10}{len(ranks):>6}  {' '.join(map(str, ranks))}")
        return lines
    width = max(len(row["axis"]) for row in found["axes"]) + 2
    lines += ["", f"{'axis':<{width}}{'size':>7}{'groups':>8}{'spacing':>9}  group of rank 0"]
    for row in found["axes"]:
        first = " ".join(map(str, row["first"][:_SHOWN])) + " …" * (len(row["first"]) > _SHOWN)
        numbers = f"{row['size']:>7}{row['groups']:>8}{row['spacing']:>9}"
        lines.append(f"{row['axis']:<{width}}{numbers}  {first}")
    lines += ["", f"{'rank':>7}" + "".join(f"{axis:>6}" for axis in _AXES)]
    columns = [found["ranks"][axis] for axis in _AXES]
    row = "{:>7}" + "{:>6}" * len(columns)
    lines += map(row.format, range(len(columns[0])), *columns)
    return lines


def _schedule(args: argparse.Namespace) -> dict[str, Any]:
    from mcore_parallel.pipeline.schedules import PAIRED, SCHEDULES

    if args.kind is None and args.png is not None:
        raise ValueError("--png draws one schedule: give its --kind")
    found: dict[str, Any] = {"stages": args.stages, "microbatches": args.microbatches}
    every = [kind for kind in SCHEDULES if not args.paired or kind in PAIRED]
    kinds = every if args.kind is None else [args.kind]
    found["schedules"] = [_simulated(kind, args) for kind in kinds]
    return found


def _simulated(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    from mcore_parallel.pipeline.draw import draw_png, draw_text
    from mcore_parallel.pipeline.schedules import make_schedule
    from mcore_parallel.pipeline.simulation import chunk_times, simulate

    alone = args.kind is not None
    chunked = alone or kind == "interleaved"  # where all are compared the options are its own
    schedule = make_schedule(
        kind,
        args.stages,
        args.microbatches,
        chunks=_default_chunks(kind, args.chunks if chunked else None),
        group_size=args.group if chunked else None,
        paired=args.paired,
    )
    names = ("forward", "backward", "weight", "exchange", "transfer")
    negative = [name for name in names if not getattr(args, name) >= 0]
    if negative:
        raise ValueError(f"--{negative[0]} {getattr(args, negative[0])}: a time is 0 or more")
    times = chunk_times(schedule, **{name: getattr(args, name) for name in names})
    result = simulate(schedule, times)
    row: dict[str, Any] = {
        "kind": kind,
        "chunks": schedule.line.num_chunks,
        "time": result.makespan,
        "bubble": result.bubble_fraction,
        "peak": [peak / schedule.line.num_chunks for peak in result.peak_activations],
    }
    if alone:
        row["drawing"] = draw_text(result)
        if args.png is not None:
            title = f"{kind}, {args.stages} stages, {args.microbatches} micro-batches:"
            draw_png(result, args.png, title=title)
    return row


def _schedule_lines(found: dict[str, Any]) -> list[str]:
    rows = found["schedules"]
    lines = [
        f"{found['stages']} stages, {found['microbatches']} micro-batches; peak: micro-batches "
        f"whose activations a stage keeps",
        f"{'schedule':<12}{'chunks':>7}{'bubble':>9}{'time':>10}{'peak':>8}{'first':>8}{'last':>8}",
    ]
    for row in rows:
        peaks = (max(row["peak"]), row["peak"][0], row["peak"][-1])
        held = "".join(f"{peak:>8g}" for peak in peaks)
        lines.append(
            f"{row['kind']:<12}{row['chunks']:>7}{row['bubble']:>9.1%}{row['time']:>10g}{held}"
        )
    for row in rows:
        lines += ["", row["drawing"]] if "drawing" in row else []
    return lines


_COMMANDS = {
    "layout": (_layout, _layout_lines),
    "schedule": (_schedule, _schedule_lines),
    "cost": (run_cost, cost_lines),
    "scaling": (run_scaling, scaling_lines),
}
