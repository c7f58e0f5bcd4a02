"""The `mcore-train` command."""

import argparse
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not args.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = args.run(args, rest)
    except (ValueError, OSError) as error:
        print(f"mcore-train: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not isinstance(error, _outside_errors()):
            raise
        print(f"mcore-train: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mcore-train: interrupted", file=sys.stderr)
        return 130
    except FloatingPointError as error:
        print(f"mcore-train: training stopped: {error}", file=sys.stderr)
        return 1
    return status


def _outside_errors() -> tuple[type[Exception], ...]:
    """What may go wrong outside of this program: a disk, a process, a kernel of one's own."""
    from mcore_ckpt import CheckpointError
    from mcore_parallel import PipelineError, RankDiedError

    return CheckpointError, PipelineError, RankDiedError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-train", description="Train language models over any parallel layout."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    quickstart = commands.add_parser(
        "quickstart", help="learn Python from the standard library, from text to samples"
    )
    quickstart.add_argument("--out", type=Path, default=Path("runs/quickstart"), metavar="DIR")
    quickstart.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    quickstart.add_argument("--nproc", type=int, default=1, metavar="K", help="processes")
    quickstart.add_argument("--tensor", type=int, default=1, metavar="T", help="tensor parallel")
    quickstart.add_argument("--pipeline", type=int, default=1, metavar="P", help="pipeline stages")
    quickstart.add_argument("--sequence-parallel", action="store_true")
    quickstart.set_defaults(run=_quickstart, takes_overrides=False)

    pretrain = commands.add_parser(
        "pretrain",
        help="train as a config says",
        epilog="Any field of the config is an option: --model.num_layers 8 --schedule.lr=1e-3",
    )
    pretrain.add_argument("--config", required=True, metavar="FILE|RECIPE")
    pretrain.add_argument(
        "--nproc", type=int, metavar="K", help="start K processes here (not under torchrun)"
    )
    pretrain.set_defaults(run=_pretrain, takes_overrides=True)

    parity = commands.add_parser(
        "parity",
        help="compare training under layouts with training in one process",
        epilog="A layout is written tp=2,pp=2,dp=2,sp (sp: sequence parallel; zero=0 to zero=3: "
        "what is sharded). Any field of the config is an option, as in pretrain.",
    )
    what = parity.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", metavar="FILE|RECIPE", help="with a --layout or several")
    what.add_argument(
        "--matrix",
        choices=("small", "full"),
        help="small models over combinations of all axes: every two values once, or everything",
    )
    what.add_argument(
        "--table", action="store_true", help="print which combinations work, and why others do not"
    )
    parity.add_argument("--layout", action="append", default=[], metavar="LAYOUT")
    parity.add_argument("--train-steps", type=int, metavar="N", help="of --config; default 3")
    parity.add_argument("--family", metavar="NAME", help="of --matrix: gpt, moe, … alone")
    parity.add_argument("--part", metavar="I/N", help="of --matrix: every N-th, from the I-th on")
    parity.add_argument(
        "--json", type=Path, metavar="FILE", help="of --matrix: append a JSON row for each"
    )
    parity.set_defaults(run=_parity, takes_overrides=True)

    bench = commands.add_parser(
        "bench",
        help="time training steps beside what the device can do",
        epilog="Any other field of the config is an option, as in pretrain.",
    )
    bench.add_argument("--preset", required=True, metavar="NAME", help="see mcore-models presets")
    bench.add_argument("--nproc", type=int, metavar="K", help="start K processes here")
    bench.add_argument("--layout", default="", metavar="LAYOUT", help="such as tp=2,sp")
    bench.add_argument("--seq-length", type=int, default=8192, metavar="S", help="default 8192")
    bench.add_argument("--micro-size", type=int, default=1, metavar="B", help="default 1")
    bench.add_argument(
        "--micro-batches", type=int, default=4, metavar="M", help="per replica and step; default 4"
    )
    bench.add_argument("--precision", default="bf16", help="bf16 (default), fp16, fp32 or fp8")
    bench.add_argument("--warmup", type=int, default=3, metavar="N", help="steps; default 3")
    bench.add_argument("--steps", type=int, default=6, metavar="N", help="measured; default 6")
    bench.add_argument("--no-split", action="store_true", help="without the profiled step")
    bench.add_argument("--json", type=Path, metavar="FILE", help="append one JSON row")
    bench.set_defaults(run=_bench, takes_overrides=True)

    merge = commands.add_parser(
        "merge", help="write a run with adapters (lora) as one without, or its adapters alone"
    )
    merge.add_argument("source", metavar="RUN", help="its checkpoint, or the directory of several")
    merge.add_argument("--to", required=True, metavar="DIR", help="a new directory")
    merge.add_argument(
        "--peft", action="store_true", help="write the adapters alone, as a folder for PEFT"
    )
    merge.set_defaults(run=_merge, takes_overrides=False)

    upcycle = commands.add_parser(
        "upcycle",
        help="write a dense model as one with experts that computes the same",
        epilog="Fields of the experts are options: --moe.num_experts 8 --moe.top_k 2",
    )
    upcycle.add_argument("source", help="a checkpoint or a Hugging Face folder")
    upcycle.add_argument("--to", required=True, metavar="DIR", help="a new directory")
    upcycle.add_argument(
        "--layers", type=int, nargs="+", metavar="I", help="whose MLPs become experts; default all"
    )
    upcycle.add_argument("--seed", type=int, default=1234, metavar="N", help="of the routers")
    upcycle.set_defaults(run=_upcycle, takes_overrides=True)

    recipes = commands.add_parser("recipes", help="list the recipes of this package")
    recipes.set_defaults(run=_recipes, takes_overrides=False)
    return parser


def _quickstart(args: argparse.Namespace, rest: list[str]) -> int:
    from mcore_parallel import ParallelConfig
    from mcore_train.quickstart import Quickstart, run_quickstart

    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps {args.steps} must be at least 1")
    parallel = ParallelConfig(
        tp=args.tensor, pp=args.pipeline, sequence_parallel=args.sequence_parallel
    )
    options = Quickstart(out=args.out, steps=args.steps, nproc=args.nproc, parallel=parallel)
    run_quickstart(options, lambda line: print(line, flush=True))
    return 0


def _load(args: argparse.Namespace, rest: list[str]) -> Any:
    from mcore_train.load import load_config

    return load_config(args.config, rest)


def _pretrain(args: argparse.Namespace, rest: list[str]) -> int:
    from mcore_train.pretrain import pretrain

    summary = pretrain(_load(args, rest), nproc=args.nproc)
    if summary.rank:
        return 0
    loss = "" if summary.loss is None else f", loss {summary.loss:.4f}"
    validation = summary.validation_loss
    if validation is not None:
        loss += f", validation loss {validation:.4f}"
    saved = "" if summary.checkpoint is None else f", checkpoint {summary.checkpoint}"
    if summary.first_step >= summary.step:
        print(f"nothing to train: the run is at step {summary.step} already{loss}{saved}")
        return 0
    print(f"trained from step {summary.first_step} to step {summary.step}{loss}{saved}")
    return 0


def _parity(args: argparse.Namespace, rest: list[str]) -> int:
    _check_parity(args, rest)
    if args.table:
        from mcore_train.parity.table import combination_tables

        print(combination_tables(), end="")
        return 0
    return _parity_matrix(args) if args.matrix else _parity_layouts(args, rest)


def _check_parity(args: argparse.Namespace, rest: list[str]) -> None:
    """Each option belongs to one of the three things that the command does."""
    if args.config is None and (args.layout or args.train_steps is not None or rest):
        given = "--layout" if args.layout else "--train-steps" if not rest else rest[0]
        raise ValueError(f"{given} is for a --config: the models of the matrix are given")
    asked = [name for name in ("family", "part", "json") if getattr(args, name) is not None]
    if asked and args.matrix is None:
        raise ValueError(f"--{asked[0]} is for --matrix small or --matrix full")
    if args.config is not None and not args.layout:
        raise ValueError("--config needs at least one --layout to compare, such as tp=2,sp")
    if args.train_steps is not None and args.train_steps < 1:
        raise ValueError(f"--train-steps {args.train_steps} must be at least 1")


def _parity_layouts(args: argparse.Namespace, rest: list[str]) -> int:
    from mcore_parallel import ParallelConfig
    from mcore_train.parity import LEAST_MARGIN, parity

    layouts = [ParallelConfig.parse(text) for text in args.layout]
    good = True
    for report in parity(_load(args, rest), layouts, steps=args.train_steps or 3):
        kinds = [kind for kind in report.kinds if kind != "copy"]
        worst = " ".join(f"{kind} {report.worst(kind).ratio:.1e}" for kind in kinds)
        failure = report.first_failure()
        verdict = "equal"
        if failure is not None:
            good = False
            verdict = f"DIFFERS, first in {failure.kind} {failure.name} by {failure.ratio:.1e}"
        line = f"{report.layout} on {report.world_size}: {verdict} (largest: {worst})"
        if report.margin < LEAST_MARGIN:
            line += f"; a router's choice hangs on {report.margin:.1e}: another seed is safer"
        print(line, flush=True)
    return 0 if good else 1


def _parity_matrix(args: argparse.Namespace) -> int:
    import json
    from collections import Counter

    from mcore_train.parity.matrix import choose_cells, run_matrix

    cells = choose_cells(args.matrix, family=args.family, part=args.part or "1/1")
    if args.json is not None:
        _check_appendable("--json", args.json)
    verdicts: Counter[str] = Counter()
    good = True
    for outcome in run_matrix(cells):
        verdicts[outcome.verdict] += 1
        good = good and outcome.is_good
        print(outcome, flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps(outcome.row()) + "\n")
    total = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    print(f"{len(cells)} combinations: {total or 'nothing to do'}", flush=True)
    return 0 if good else 1


def _bench(args: argparse.Namespace, rest: list[str]) -> int:
    import json

    from mcore_train.bench import BenchOptions, bench
    from mcore_train.bench.config import bench_config
    from mcore_train.bench.text import describe

    config = bench_config(
        args.preset,
        layout=args.layout,
        world_size=args.nproc,
        seq_length=args.seq_length,
        micro_size=args.micro_size,
        micro_batches=args.micro_batches,
        precision=args.precision,
        overrides=rest,
    )
    options = BenchOptions(warmup=args.warmup, steps=args.steps, split=not args.no_split)
    if args.json is not None:
        _check_appendable("--json", args.json)
    report = bench(config, options, nproc=args.nproc)
    if report.rank == 0:
        print("\n".join(describe(report)), flush=True)
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(json.dumps({"preset": args.preset} | report.row()) + "\n")
    return 0


def _merge(args: argparse.Namespace, rest: list[str]) -> int:
    from mcore_train.adapters import merge_run, open_run, save_peft

    if args.peft:
        print(f"adapters in {save_peft(args.to, open_run(args.source)[0])}")
    else:
        print(f"merged weights in {merge_run(args.source, args.to)}")
    return 0


def _upcycle(args: argparse.Namespace, rest: list[str]) -> int:
    from mcore_train.load import parse_overrides
    from mcore_train.upcycle import upcycle

    moe = {}
    for path, value in parse_overrides(rest):
        if len(path) != 2 or path[0] != "moe":
            raise ValueError(f"--{'.'.join(path)} is no field of the experts, as --moe.top_k is")
        moe[path[1]] = value
    for name in ("num_experts", "top_k"):
        if name not in moe:
            raise ValueError(f"--moe.{name} is missing")
    made = upcycle(args.source, args.to, moe, layers=args.layers, seed=args.seed)
    print(f"model with experts in {made}")
    return 0


def _check_appendable(option: str, path: Path) -> None:
    """ValueError now, rather than an error when all is measured and lost."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from None


def _recipes(args: argparse.Namespace, rest: list[str]) -> int:
    from mcore_train.load import recipe_names

    print("\n".join(recipe_names()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
