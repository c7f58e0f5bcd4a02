"""The `mcore-rl` command."""

import argparse
import json
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status."""
    parser = argparse.ArgumentParser(prog="mcore-rl", description="Environments for training.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("environments", help="list the environments")
    play = commands.add_parser("play", help="play one episode: actions come from standard input")
    play.add_argument("environment")
    play.add_argument("--seed", type=int, default=0, help="the task (default 0)")
    play.add_argument(
        "--option", action="append", default=[], metavar="NAME=INT", help="e.g. terms=3"
    )
    args = parser.parse_args(argv)
    try:
        return _play(args) if args.command == "play" else _list()
    except ValueError as error:
        print(f"mcore-rl: {error}", file=sys.stderr)
        return 2


def _list() -> int:
    from mcore_rl.environments import ENVIRONMENTS

    for name, kind in ENVIRONMENTS.items():
        print(f"{name:<16}{(kind.__doc__ or '').splitlines()[0]}")
    return 0


def _play(args: argparse.Namespace) -> int:
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
