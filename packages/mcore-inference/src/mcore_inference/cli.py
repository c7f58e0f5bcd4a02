"""The `mcore-inference` command."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit status.

    0: done. 1: the model gave no numbers, or a server ended with requests under way. 2: a mistake
    of the user, told in one line.
    """
    args = _parser().parse_args(argv)
    from mcore_ckpt import CheckpointError

    try:
        return _serve(args) if args.command == "serve" else _generate(args)
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
    _add_model(generate.add_mutually_exclusive_group(required=True))
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
    _add_serve(commands)
    return parser


def _add_model(group: "argparse._MutuallyExclusiveGroup") -> None:
    where = "a step folder, or a folder of them: then the newest; or an address (s3://bucket/run)"
    group.add_argument("--checkpoint", metavar="DIR", help=where)
    group.add_argument("--hf", metavar="DIR", help="a Hugging Face folder")


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="answer completions over HTTP (extra `server`)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = serve.add_argument
    _add_model(serve.add_mutually_exclusive_group(required=True))
    where = "a folder, a .model file or `byte`, in place of the checkpoint's own"
    add("--tokenizer", metavar="WHERE", help=where)
    where = "in place of the one in the tokenizer's folder"
    add("--chat-template", metavar="FILE", help=where)
    add("--host", default="127.0.0.1", metavar="H", help="address to listen at")
    add("--port", type=int, default=8000, metavar="P", help="0: a free one")
    add("--model-name", metavar="NAME", help="for clients; without it the last part of DIR")
    dtypes = ("float32", "bfloat16")
    add("--dtype", choices=dtypes, default="float32", help="of the weights")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to run")
    add("--max-sequences", type=int, default=64, metavar="N", help="how many run at a time")
    add("--max-batch-tokens", type=int, default=8192, metavar="N", help="tokens of a pass")
    add("--max-waiting", type=int, default=1024, metavar="N", help="how many may wait; then 429")
    limit = "seconds after SIGTERM for requests under way"
    add("--drain-timeout", type=float, default=30.0, metavar="S", help=limit)


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
    load = LLM.from_checkpoint if args.hf is None else LLM.from_hf
    llm = load(
        args.checkpoint or args.hf,
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


def _serve(args: argparse.Namespace) -> int:
    missing = [name for name in ("fastapi", "pydantic", "uvicorn") if not _installed(name)]
    if missing:
        names = " and ".join(missing)
        raise ValueError(f"serve needs {names}: pip install 'mcore-inference[server]'")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port {args.port} must lie in 0 to 65535")
    if not args.drain_timeout >= 0:
        raise ValueError(f"--drain-timeout {args.drain_timeout} must be at least 0")
    if args.max_waiting < 0:
        raise ValueError(f"--max-waiting {args.max_waiting} must be at least 0")

    import torch

    from mcore_inference.llm import LLM
    from mcore_inference.server import bind, serve
    from mcore_parallel import ParallelMesh

    # Before the model is read, which may take minutes.
    with bind(args.host, args.port) as bound:
        load = LLM.from_checkpoint if args.hf is None else LLM.from_hf
        llm = load(
            args.checkpoint or args.hf,
            tokenizer=args.tokenizer,
            chat_template=args.chat_template,
            mesh=ParallelMesh.single(args.device),
            dtype=getattr(torch, args.dtype),
            max_sequences=args.max_sequences,
            max_batch_tokens=args.max_batch_tokens,
        )
        return serve(
            llm,
            bound,
            name=args.model_name or Path(args.checkpoint or args.hf).resolve().name,
            max_waiting=args.max_waiting,
            drain_timeout=args.drain_timeout,
        )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # named in sys.modules as not to be had
        return False


if __name__ == "__main__":
    raise SystemExit(main())
