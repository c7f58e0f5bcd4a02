"""The `mcore-rl` command."""

import argparse
import json
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not args.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = args.run(args, rest)
    except (ValueError, OSError) as error:
        print(f"mcore-rl: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not isinstance(error, _outside_errors()):
            raise
        print(f"mcore-rl: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mcore-rl: interrupted", file=sys.stderr)
        return 130
    except FloatingPointError as error:
        print(f"mcore-rl: training stopped: {error}", file=sys.stderr)
        return 1
    return status


def _outside_errors() -> tuple[type[Exception], ...]:
    """What may go wrong outside of this program: a disk, a process, a part of one's own."""
    from mcore_ckpt import CheckpointError
    from mcore_parallel import PipelineError, RankDiedError
    from mcore_rl.environments import EpisodeError

    return CheckpointError, EpisodeError, PipelineError, RankDiedError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-rl", description="Reinforcement learning of language models."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser(
        "train",
        help="train as a config says",
        epilog="Any field of the config is an option: --rollout.group_size 16 --schedule.lr=1e-3",
    )
    train.add_argument("--config", required=True, metavar="FILE|RECIPE")
    train.add_argument(
        "--nproc", type=int, metavar="K", help="start K processes here (not under torchrun)"
    )
    train.set_defaults(run=_train, takes_overrides=True)

    recipes = commands.add_parser("recipes", help="list the recipes of this package")
    recipes.set_defaults(run=_recipes, takes_overrides=False)

    environments = commands.add_parser("environments", help="list the environments")
    environments.set_defaults(run=_list, takes_overrides=False)

    play = commands.add_parser("play", help="play one episode: actions come from standard input")
    play.add_argument("environment")
    play.add_argument("--seed", type=int, default=0, help="the task (default 0)")
    play.add_argument(
        "--option", action="append", default=[], metavar="NAME=INT", help="e.g. terms=3"
    )
    play.set_defaults(run=_play, takes_overrides=False)
    return parser


def _train(args: argparse.Namespace, rest: list[str]) -> int:
    from mcore_rl.load import load_config
    from mcore_rl.train import train

    config = load_config(args.config, rest)
    summary = train(config, nproc=args.nproc)
    if summary.rank:
        return 0
    end = "" if summary.checkpoint is None else f", checkpoint {summary.checkpoint}"
    if config.log.directory is not None:
        end += f", metrics and curve in {config.log.directory}"
    if summary.first_step >= summary.step:
        print(f"nothing to train: the run is at step {summary.step} already{end}")
        return 0
    held_out = _change(", on held-out tasks", summary.first_held_out, summary.held_out)
    reward = _change(": reward", summary.first_reward, summary.reward)
    print(f"trained from step {summary.first_step} to step {summary.step}{reward}{held_out}{end}")
    return 0


def _change(what: str, first: float | None, last: float | None) -> str:
    return "" if first is None or last is None else f"{what} {first:.3f} -> {last:.3f}"


def _recipes(args: argparse.Namespace, rest: list[str]) -> int:
    from mcore_rl.load import recipe_names

    print("\n".join(recipe_names()))
    return 0


def _list(args: argparse.Namespace, rest: list[str]) -> int:
    from mcore_rl.environments import ENVIRONMENTS

    for name, kind in ENVIRONMENTS.items():
        print(f"{name:<16}{(kind.__doc__ or '').splitlines()[0]}")
    return 0


def _play(args: argparse.Namespace, rest: list[str]) -> int:
    from mcore_rl.environments import make_environment, play

    options = {}
    for text in args.option:
        name, _, value = text.partition("=")
        if not value.lstrip("-").isdigit():
            raise ValueError(f"--option {text}: write NAME=INT")
        options[name] = int(value)

    def person(observations: tuple[str, ...], actions: tuple[str, ...]) -> str:
        print(observations[-1], flush=True)
        line = sys.stdin.readline()
        if not line:
            raise ValueError("standard input ended before the episode was over")
        return line.strip()

    episode = play(make_environment(args.environment, **options), person, args.seed)
    print(json.dumps({"reward": episode.total_reward, **episode.info[-1]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
