"""The `mcore-inference` command."""

import argparse
import json
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="mcore-inference", description="Generate text from mcore checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="continue one or more prompts")
    generate.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a step folder, or a folder of them"
    )
    generate.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="repeat for several"
    )
    generate.add_argument("--max-tokens", type=int, default=64, help="default 64")
    generate.add_argument(
        "--temperature", type=float, default=0.0, help="0 (default): always the likeliest token"
    )
    generate.add_argument("--top-k", type=int, default=0, help="0 (default): all tokens")
    generate.add_argument("--top-p", type=float, default=1.0, help="default 1")
    generate.add_argument("--seed", type=int, default=0, help="default 0")
    generate.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    generate.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt")
    args = parser.parse_args(argv)
    try:
        return _generate(args)
    except (ValueError, OSError) as error:
        print(f"mcore-inference: {error}", file=sys.stderr)
        return 2


def _generate(args: argparse.Namespace) -> int:
    from mcore_inference.sampling import SamplingParams

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    import torch

    from mcore_inference.llm import LLM

    llm = LLM.from_checkpoint(args.checkpoint, dtype=getattr(torch, args.dtype))
    for completion in llm.generate(args.prompt, params):
        if args.json:
            row = {
                "prompt": completion.prompt,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
            }
            print(json.dumps(row))
        else:
            print(completion.prompt + completion.text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
