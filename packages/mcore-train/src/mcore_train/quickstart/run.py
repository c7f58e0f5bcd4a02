"""The main job on real text, from nothing to a model that writes: `mcore-train quickstart`."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_models import count_parameters
from mcore_parallel import ParallelConfig
from mcore_train.checkpoint_config import CheckpointConfig
from mcore_train.config import LogConfig, TrainConfig
from mcore_train.load import config_to_tree, load_config
from mcore_train.plot import plot_losses
from mcore_train.pretrain import RunSummary, check_run, pretrain, pretrain_apart
from mcore_train.quickstart.generate import sample
from mcore_train.quickstart.prepare import prepare_corpus, prepare_data, prepare_tokenizer
from mcore_train.quickstart.stages import Stages

RESUME_STEPS = 5
PROMPT = "def "


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """What to do: where, for how many steps (None: the recipe's), over which layout."""

    out: Path = Path("runs/quickstart")
    steps: int | None = None
    nproc: int = 1
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    progress: bool = True

    def config(self) -> TrainConfig:
        """The recipe with the folders, steps and layout filled in."""
        return quickstart_config(self)


def quickstart_config(options: Quickstart) -> TrainConfig:
    """Return the recipe `quickstart` with data, folders, steps and layout filled in.

    The learning rate falls over `steps`; the few steps after a resume go on at the lowest rate.
    """
    base = load_config("quickstart")
    steps = options.steps or base.steps
    warmup = min(base.schedule.warmup_steps, max(steps // 10, 1))
    out = options.out
    return dataclasses.replace(
        base,
        steps=steps,
        parallel=options.parallel,
        schedule=dataclasses.replace(
            base.schedule, warmup_steps=warmup, decay_steps=max(steps - warmup, 1)
        ),
        data=dataclasses.replace(
            base.data,
            train=out / "data" / "train",
            validation=out / "data" / "validation",
            tokenizer=out / "tokenizer",
        ),
        evaluate=dataclasses.replace(base.evaluate, interval=max(steps // 5, 1)),
        checkpoint=dataclasses.replace(
            base.checkpoint,
            directory=out / "checkpoints",
            interval=max(steps // 4, 1),
            keep_last=2,
        ),
        log=dataclasses.replace(base.log, directory=out, progress=options.progress),
    )


def run_quickstart(options: Quickstart, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Do every stage that is not done yet, say one line about each, and return the results.

    Raises:
        ValueError: steps, processes and layout do not fit together; before anything is done.
    """
    config = options.config()
    check_layout_of(config, options.nproc)
    stages = Stages(folder=options.out, say=say)
    corpus = prepare_corpus(stages)
    tokenizer = prepare_tokenizer(stages, options.out, corpus)
    data = prepare_data(stages, options.out, corpus, tokenizer, progress=options.progress)
    _forget_another_run(options.out, {"data": data, "model": config_to_tree(config)["model"]})
    trained = stages.run(
        "training",
        {"data": data, "config": _inputs(config)},
        lambda: _train(config, options.nproc),
        lambda r: _describe_training(config, r, data),
    )
    resumed = stages.run(
        "resume",
        {"training": trained},
        lambda: _resume(config, options.nproc, trained),
        _describe_resume,
    )
    picture = options.out / "loss.png"
    plot_losses(
        options.out / "metrics.jsonl",
        picture,
        lines={"unigram entropy": data["unigram"], "bigram entropy": data["bigram"]},
        title="Learning Python from the standard library",
    )
    say(f"picture: {picture}")
    text = sample(options.out / "checkpoints", PROMPT)
    say(text or "sample: install mcore-inference to see the model write")
    for line in _what_next(options):
        say(line)
    return {"data": data, "training": trained, "resume": resumed, "sample": text}


def check_layout_of(config: TrainConfig, nproc: int) -> None:
    """Check what needs no data: the layout against the architecture and the processes."""
    bare = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, train=None, validation=None, mock=True),
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
    )
    check_run(bare, nproc)


def _forget_another_run(out: Path, identity: dict[str, Any]) -> None:
    """Remove checkpoints and metrics of a model of another shape, or of other tokens.

    They appear when the interpreter or the recipe has changed; a run cannot go on from them.
    """
    note = out / "run.json"
    text = json.dumps(identity, sort_keys=True)
    if note.is_file() and note.read_text() == text:
        return
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    (out / "metrics.jsonl").unlink(missing_ok=True)
    note.write_text(text)


def _inputs(config: TrainConfig) -> dict[str, Any]:
    """What the result of training depends on: not the layout, nor how it is logged."""
    tree = config_to_tree(config)
    return {k: v for k, v in tree.items() if k not in {"parallel", "log", "device"}}


def _train(config: TrainConfig, nproc: int) -> dict[str, Any]:
    return _results(pretrain(config, nproc=nproc), config.steps)


def _resume(config: TrainConfig, nproc: int, trained: dict[str, Any]) -> dict[str, Any]:
    """Go on for a few steps in new processes, from the newest checkpoint."""
    longer = dataclasses.replace(
        config,
        steps=trained["step"] + RESUME_STEPS,
        evaluate=dataclasses.replace(config.evaluate, interval=None, at_start=True),
    )
    return {
        **_results(pretrain_apart(longer, nproc=nproc), longer.steps),
        "validation_before": trained["validation_loss"],
    }


def _results(summary: RunSummary, steps: int) -> dict[str, Any]:
    if summary.step < steps:  # ended by a signal and saved: the next call goes on from there
        raise SystemExit(143)
    return {
        **dataclasses.asdict(summary),
        "checkpoint": str(summary.checkpoint),
    }


def _describe_training(config: TrainConfig, results: dict[str, Any], data: dict[str, Any]) -> str:
    size = count_parameters(config.model).total / 1e6
    loss = results["validation_loss"]
    below = 1 - loss / data["unigram"]
    where = f"{abs(below):.0%} {'below' if below >= 0 else 'above'}"
    return (
        f"{size:.1f} M parameters, step {results['step']}, validation loss {loss:.3f} nats, "
        f"{where} the unigram entropy {data['unigram']:.2f}; "
        f"checkpoint {results['checkpoint']}"
    )


def _describe_resume(results: dict[str, Any]) -> str:
    before, after = results["validation_before"], results["first_validation_loss"]
    same = "as it was saved" if after == before else f"saved at {before!r}"
    return (
        f"new process, from step {results['first_step']} (validation loss {after:.6f}, {same}) "
        f"to step {results['step']}, validation loss {results['validation_loss']:.3f}"
    )


def _what_next(options: Quickstart) -> list[str]:
    where = "" if options.out == Quickstart().out else f" --out {options.out}"
    command = f"mcore-train quickstart{where} --steps"
    steps = options.config().steps
    generate = f"mcore-inference generate --checkpoint {options.out / 'checkpoints'}"
    return [
        f"everything lies in {options.out}: tokenizer, data, checkpoints, metrics.jsonl, loss.png, "
        "tensorboard",
        "three commands to try next:",
        f"  {command} {2 * steps}   # train longer, from the checkpoint",
        f"  {generate} --prompt 'class ' --temperature 0.7",
        f"  {command} {3 * steps} --nproc 2 --tensor 2   # go on under another layout",
    ]
