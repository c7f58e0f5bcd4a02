"""The commands `mcore-parallel cost` and `mcore-parallel scaling`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_parallel.cost.planner import Estimate
    from mcore_parallel.cost.work import Workload

_NAMES = {
    "products": "matrix products",
    "attention": "attention",
    "streaming": "memory-bound operations",
    "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed",
    "ep": "exchange with experts, exposed",
    "bubble": "waiting for other stages",
    "pp": "messages between stages",
    "dp": "data parallel, exposed",
    "optimizer": "optimizer",
}
_GIB = 2.0**30


def add_commands(commands: Any) -> None:
    """Add both commands to an argparse parser's subparsers."""
    cost = commands.add_parser(
        "cost",
        help="estimate a training step under a layout, or rank all layouts",
        description="Estimate the time and the memory of a training step, and where they go. "
        "Without --layout try all layouts and show the fastest that fit into memory.",
    )
    cost.add_argument(
        "--published",
        action="store_true",
        help="only show what the estimates say of steps that others have measured",
    )
    cost.add_argument("--world", type=int, metavar="N", help="number of GPUs")
    cost.add_argument("--batch", type=int, metavar="B", help="sequences of a step")
    cost.add_argument("--layout", metavar="TEXT", help="such as 'tp=8,pp=16,sp'")
    cost.add_argument("--micro-batch", type=int, default=1, metavar="M", help="with --layout")
    cost.add_argument(
        "--recompute", default="none", help="with --layout: none (default), full, or norm+mlp+…"
    )
    cost.add_argument("--top", type=int, default=10, metavar="K", help="layouts shown (default 10)")
    _add_model(cost)
    scaling = commands.add_parser(
        "scaling",
        help="the fastest layout for every number of GPUs",
        description="Rank layouts for several numbers of GPUs, the batch growing with them or not.",
    )
    scaling.add_argument(
        "--worlds", default="512,1024,2048,4096,8192,16384", metavar="N,…", help="numbers of GPUs"
    )
    scaling.add_argument("--batch-per-gpu", type=float, metavar="X", help="sequences for each GPU")
    scaling.add_argument("--batch", type=int, metavar="B", help="sequences of every step")
    scaling.add_argument("--png", type=Path, metavar="FILE", help="draw (needs matplotlib)")
    _add_model(scaling)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="a published model's name, or a file of `mcore-models shape`")
    add("--machine", default="h100", help="a100, h100 (default), h200, h800, or a .json file")
    add("--seq-length", type=int, default=8192, metavar="S", help="tokens (default 8192)")
    add("--precision", default="bf16", help="bf16 (default) or fp8 matrix products")
    add("--tensor-overlap", type=float, default=0.0, metavar="X", help="share hidden (default 0)")
    add("--expert-overlap", type=float, default=0.0, metavar="X", help="share hidden (default 0)")
    add("--dispatch", default="all-to-all", help="all-to-all (default) or by-node")
    add(
        "--schedules",
        default="1f1b,interleaved",
        metavar="A,…",
        help="pipeline schedules that a ranking tries (default 1f1b,interleaved)",
    )
    add("--json", action="store_true", help="print JSON")


def run_cost(args: argparse.Namespace) -> dict[str, Any]:
    """Return what `mcore-parallel cost` found, ready for JSON."""
    from mcore_parallel.config import ParallelConfig
    from mcore_parallel.cost.planner import Planner
    from mcore_parallel.cost.ranking import rank

    if args.published:
        return {"published": _published()}
    for name in ("model", "world", "batch"):
        if getattr(args, name) is None:
            raise ValueError(f"cost needs --{name} (or --published)")
    planner = Planner(*_model(args), args.world)
    if args.layout is not None:
        work = _work(args, args.batch, micro_batch=args.micro_batch, recompute=args.recompute)
        found = planner.estimate(ParallelConfig.parse(args.layout), work)
        return {"estimates": [describe(found)]}
    if args.micro_batch != 1 or args.recompute != "none":
        raise ValueError("--micro-batch and --recompute go with --layout: a ranking tries them all")
    if args.top < 1:
        raise ValueError(f"--top {args.top}: at least 1 layout is shown")
    schedules = args.schedules.split(",")
    ranking = rank(planner, _work(args, args.batch), keep=args.top, schedules=schedules)
    return {
        "tried": ranking.tried,
        "too_large": ranking.too_large,
        "refused": ranking.refused,
        "estimates": [describe(one) for one in ranking.best],
    }


def run_scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Return what `mcore-parallel scaling` found, ready for JSON, and draw it."""
    from mcore_parallel.cost.planner import Planner
    from mcore_parallel.cost.ranking import rank

    if args.model is None:
        raise ValueError("scaling needs --model")
    if (args.batch is None) == (args.batch_per_gpu is None):
        raise ValueError("scaling needs either --batch or --batch-per-gpu")
    shape, machine = _model(args)
    rows = []
    for world in _worlds(args.worlds):
        batch = args.batch or max(1, round(args.batch_per_gpu * world))
        planner = Planner(shape, machine, world)
        schedules = args.schedules.split(",")
        ranking = rank(planner, _work(args, batch), keep=3, schedules=schedules)
        rows.append(describe(ranking.best[0]))
    grows = "fixed" if args.batch else "growing"
    found = {"model": args.model, "machine": machine.name, "batch": grows, "rows": rows}
    if args.png is not None:
        from mcore_parallel.cost.draw import draw_scaling

        draw_scaling(found, args.png)
    return found


def describe(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as plain values: seconds, bytes and their parts."""
    work, memory = estimate.work, estimate.memory[estimate.fullest]
    return {
        "layout": estimate.config.describe(),
        "world": estimate.world,
        "batch": work.batch,
        "seq_length": work.seq_length,
        "micro_batch": work.micro_batch,
        "recompute": work.recompute,
        "step": estimate.step,
        "tokens_per_second": estimate.tokens_per_second,
        "model_flops": estimate.model_flops,
        "utilization": estimate.utilization,
        "seconds": dict(estimate.seconds),
        "fits": estimate.fits,
        "fullest_stage": estimate.fullest,
        "memory": {**vars(memory), "total": memory.total, "of": estimate.machine.memory},
    }


def _model(args: argparse.Namespace) -> tuple[Any, Any]:
    from mcore_parallel.cost.files import read_machine, read_shape

    return read_shape(args.model), read_machine(args.machine)


def _work(args: argparse.Namespace, batch: int, **changes: Any) -> Workload:
    from mcore_parallel.cost.work import Precision, Runtime, Workload

    runtime = Runtime(
        tensor_overlap=args.tensor_overlap,
        expert_overlap=args.expert_overlap,
        dispatch=args.dispatch,
    )
    precision = Precision(format=args.precision)
    return Workload(
        batch=batch, seq_length=args.seq_length, precision=precision, runtime=runtime, **changes
    )


def _worlds(text: str) -> list[int]:
    try:
        return [int(world) for world in text.split(",")]
    except ValueError:
        raise ValueError(f"--worlds {text!r} is not of the form 512,1024,2048") from None


def _published() -> list[dict[str, Any]]:
    from mcore_parallel.cost.published import points

    found = []
    for point in points():
        estimate = point.estimate()
        found.append(
            {
                "name": point.name,
                "source": point.source,
                "machine": point.machine,
                "measured": point.seconds,
                "assumed": point.assumed,
                "error": estimate.step / point.seconds - 1,
                **describe(estimate),
            }
        )
    return found


def cost_lines(found: dict[str, Any]) -> list[str]:
    """Return what `mcore-parallel cost` prints."""
    if "published" in found:
        return _published_lines(found["published"])
    estimates = found["estimates"]
    if "tried" not in found:
        return _one_lines(estimates[0])
    lines = [
        f"{found['tried']} layouts tried, {found['too_large']} too large, {found['refused']} "
        f"that cannot be; the fastest:",
        _HEADER,
    ]
    return lines + [_row(one) for one in estimates]


def scaling_lines(found: dict[str, Any]) -> list[str]:
    """Return what `mcore-parallel scaling` prints."""
    lines = [f"{found['model']} on {found['machine']}, batch {found['batch']}", _HEADER]
    return lines + [_row(one) for one in found["rows"]]


_SHORT = {
    **{"compute": ("products", "attention", "streaming"), "tp": ("tp",), "cp": ("cp",)},
    **{"ep": ("ep",), "wait": ("bubble", "pp"), "dp": ("dp",), "opt": ("optimizer",)},
}
_HEADER = (
    f"{'GPUs':>6}{'batch':>7}{'step s':>8}{'MFU':>7}{'GiB':>6}  "
    + "".join(f"{name:>8}" if name == "compute" else f"{name:>6}" for name in _SHORT)
    + "  layout"
)


def _row(one: dict[str, Any]) -> str:
    seconds, step = one["seconds"], one["step"]
    shares = {name: sum(seconds[part] for part in parts) / step for name, parts in _SHORT.items()}
    split = "".join(
        f"{share:>8.1%}" if name == "compute" else f"{share:>6.1%}"
        for name, share in shares.items()
    )
    total = one["memory"]["total"] / _GIB
    layout = f"{one['layout']} micro-batch={one['micro_batch']} recompute={one['recompute']}"
    return (
        f"{one['world']:>6}{one['batch']:>7}{step:>8.2f}{one['utilization']:>7.1%}{total:>6.1f}  "
        f"{split}  {layout}"
    )


def _one_lines(one: dict[str, Any]) -> list[str]:
    lines = [
        f"{one['layout']} on {one['world']} GPUs, batch {one['batch']} of {one['seq_length']}, "
        f"micro-batch {one['micro_batch']}, recompute {one['recompute']}",
        "",
        f"{'step':<34}{one['step']:>9.3f} s",
    ]
    for name, seconds in one["seconds"].items():
        if seconds:
            lines.append(f"  {_NAMES[name]:<32}{seconds:>9.3f} s{seconds / one['step']:>8.1%}")
    lines += [
        f"{'tokens':<34}{one['tokens_per_second']:>9.0f} /s of a GPU",
        f"{'model FLOPs':<34}{one['model_flops'] / 1e12:>9.0f} TFLOP/s of a GPU, "
        f"{one['utilization']:.1%} of the bf16 peak",
        "",
        f"{'memory of stage ' + str(one['fullest_stage']) + ', the fullest':<34}"
        f"{one['memory']['total'] / _GIB:>9.1f} GiB of {one['memory']['of'] / _GIB:.0f}"
        + ("" if one["fits"] else ": too much"),
    ]
    for name, size in one["memory"].items():
        if name not in ("total", "of") and size:
            lines.append(f"  {name:<32}{size / _GIB:>9.1f} GiB")
    return lines


def _published_lines(rows: list[dict[str, Any]]) -> list[str]:
    width = max(len(row["name"]) for row in rows)
    lines = [
        f"{'model':<{width}} {'machine':<7} {'GPUs':>6} {'measured s':>10} {'estimate s':>10} "
        f"{'error':>7} {'MFU':>6}  source"
    ]
    for row in rows:
        figures = f"{row['measured']:>10.3f} {row['step']:>10.3f} {row['error']:>+7.1%}"
        lines.append(
            f"{row['name']:<{width}} {row['machine']:<7} {row['world']:>6,} {figures} "
            f"{row['utilization']:>6.1%}  {row['source']}"
        )
    mean = sum(abs(row["error"]) for row in rows) / len(rows)
    return [*lines, f"mean of the errors' sizes: {mean:.1%}"]
