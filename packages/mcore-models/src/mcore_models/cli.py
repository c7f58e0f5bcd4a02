"""The `mcore-models` command."""

import argparse
import sys
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcore_models.config import ModelConfig


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status.

    0 when done, 2 for a mistake of the user's, which prints one line.
    """
    parser = argparse.ArgumentParser(prog="mcore-models", description="Published architectures.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("presets", help="list the models known by name, with their sizes")
    show = commands.add_parser("show", help="print one model's architecture and costs")
    show.add_argument("preset", help="a name from `mcore-models presets`")
    show.add_argument(
        "--seq-length", type=int, help="tokens per document for the FLOPs (default: its longest)"
    )
    shape = commands.add_parser(
        "shape", help="print one model's shape as JSON, for `mcore-parallel cost --model FILE`"
    )
    shape.add_argument("preset", help="a name from `mcore-models presets`")
    memory = commands.add_parser(
        "memory", help="lay one model out over ranks, and print what a rank of each stage holds"
    )
    memory.add_argument("preset", help="a name from `mcore-models presets`")
    memory.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    memory.add_argument(
        "--layout", required=True, metavar="TEXT", help="such as 'pp=16,ep=64' or 'tp=8,pp=4,sp'"
    )
    args = parser.parse_args(argv)
    try:
        if args.command == "memory":
            return _memory(args.preset, args.layout, args.world)
        if args.command == "shape":
            return _shape(args.preset)
        return _presets() if args.command == "presets" else _show(args.preset, args.seq_length)
    except ValueError as error:
        print(f"mcore-models: {error}", file=sys.stderr)
        return 2


def _presets() -> int:
    from mcore_models.accounting import count_parameters
    from mcore_models.presets import preset, preset_names

    print(f"{'name':<20}{'parameters':>16}{'layers':>8}{'hidden':>8}{'heads':>7}{'vocab':>9}")
    for name in preset_names():
        config = preset(name)
        print(
            f"{name:<20}{count_parameters(config).total:>16,}{config.num_layers:>8}"
            f"{config.hidden_size:>8}{_heads(config):>7}{config.vocab_size:>9}"
        )
    return 0


def _heads(config: "ModelConfig") -> int:
    return config.latent.num_heads if config.latent is not None else config.num_heads


def _shape(name: str) -> int:
    import json

    from mcore_models.accounting import model_shape
    from mcore_models.presets import preset
    from mcore_parallel.cost.files import shape_to_json

    print(json.dumps(shape_to_json(model_shape(preset(name))), indent=1))
    return 0


def _memory(name: str, layout: str, world: int) -> int:
    from mcore_models.memory import memory_per_rank, table
    from mcore_models.presets import preset
    from mcore_parallel import ParallelConfig

    print(table(memory_per_rank(preset(name), ParallelConfig.parse(layout), world)))
    print("GiB of a rank in training with bf16 weights, besides activations")
    return 0


def _show(name: str, seq_length: int | None) -> int:
    from mcore_models.accounting import count_parameters, flops_per_token
    from mcore_models.presets import preset

    config = preset(name)
    length = config.max_positions if seq_length is None else seq_length
    if length < 1:
        raise ValueError(f"--seq-length={length} must be at least 1")
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            for part in fields(value):
                if (inner := getattr(value, part.name)) != part.default:
                    print(f"{field.name + '.' + part.name:<26}{inner}")
        elif value is not None:
            print(f"{field.name:<26}{value}")
    count = count_parameters(config)
    print(f"{'parameters':<26}{count.total:,}")
    print(f"{'  in embeddings':<26}{count.embedding:,}")
    print(f"{'  in matmuls':<26}{count.matmul:,}")
    if count.active != count.total:
        print(f"{'  used by a token':<26}{count.active:,}")
    print(f"{'training FLOPs':<26}{flops_per_token(config, length):.4g} per token of {length}")
    return 0
