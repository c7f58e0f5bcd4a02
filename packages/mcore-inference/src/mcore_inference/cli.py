"""The `mcore-inference` command."""

import argparse
import json
import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status.

    0: done. 1: the model gave no numbers. 2: a mistake of the user, told in one line.
    """
    args = _parser().parse_args(argv)
    from mcore_ckpt import CheckpointError

    try:
        return _generate(args)
    except FloatingPointError as error:
        print(f"mcore-inference: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError, CheckpointError) as error:
        print(f"mcore-inference: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcore-inference", description="Generate text from mcore checkpoints."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser(
        "generate",
        help="continue one or more prompts",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    generate.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a step folder, or a folder of them: then the newest",
    )
    generate.add_argument(
        "--prompt", action="append", required=True, metavar="TEXT", help="repeat for several"
    )
    generate.add_argument(
        "--tokenizer",
        metavar="WHERE",
        help="a folder, a .model file or `byte`, in place of the checkpoint's own",
    )
    generate.add_argument("--max-tokens", type=int, default=64, metavar="N", help="at most")
    generate.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0: the likeliest token"
    )
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all tokens")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: all")
    generate.add_argument("--seed", type=int, default=0, metavar="S", help="of the samples")
    generate.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    generate.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights"
    )
    generate.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to run")
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt")
    return parser


def _generate(args: argparse.Namespace) -> int:
    import torch

    from mcore_inference.llm import LLM
    from mcore_inference.sampling import SamplingParams
    from mcore_parallel import ParallelMesh

    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    llm = LLM.from_checkpoint(
        args.checkpoint,
        tokenizer=args.tokenizer,
        mesh=ParallelMesh.single(args.device),
        dtype=getattr(torch, args.dtype),
    )
    for completion in llm.generate(args.prompt, params):
        if args.json:
            row = {
                "prompt": completion.prompt,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "logprobs": list(completion.logprobs),
                "finish_reason": completion.finish_reason,
            }
            print(json.dumps(row))
        else:
            print(completion.prompt + completion.text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
