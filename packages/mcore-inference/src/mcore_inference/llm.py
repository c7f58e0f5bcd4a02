"""A model and its tokenizer as one object that answers prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mcore_ckpt
from mcore_ckpt.hf import HFFolder, load_hf
from mcore_data import ChatTemplate, Tokenizer, load_tokenizer
from mcore_inference.engine import Engine
from mcore_inference.output import completion
from mcore_inference.request import Completion, Request
from mcore_inference.runner import ModelRunner
from mcore_inference.sampling import SamplingParams
from mcore_inference.text import TextStream
from mcore_inference.weights import WeightLink, model_tensors
from mcore_kernels import KernelConfig
from mcore_models import GPT, Builder, ModelConfig, build_model
from mcore_models.hf import ARCHITECTURES, Architecture
from mcore_parallel import Group, LayoutTensor, ParallelMesh, broadcast_object

Prompt = str | Sequence[int]
"""A text, or its tokens."""


class LLM:
    """Text in, text out.

        llm = LLM.from_checkpoint("runs/quickstart/checkpoints")
        print(llm.generate("def ", SamplingParams(max_tokens=32))[0].text)

    The model is put into evaluation mode. When its mesh has several ranks, all of them construct
    the object and make the same calls, and all get the same answers.

    Args:
        model: the whole model, or this rank's part of one cut over tp.
        tokenizer: its tokenizer. Only ids that it knows are sampled.
        chat_template: how conversations become prompts; default a line per turn. The special token
            with which it ends a turn ends a text, as the tokenizer's own end tokens do.
        end_ids: more tokens that end a text.
        start_id: of an encoder-decoder, what its decoder starts from; see `ModelRunner`.
        max_sequences, max_batch_tokens: how much runs at a time; see `Engine`.

    Raises:
        ValueError: the model is cut in a way that generation does not run with, or has fewer rows
            than the tokenizer has ids.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        end_ids: Iterable[int] = (),
        start_id: int = 0,
        max_sequences: int = 64,
        max_batch_tokens: int = 8192,
    ) -> None:
        rows, ids = model.config.vocab_size, tokenizer.vocab_size
        if ids > rows:
            raise ValueError(
                f"the tokenizer has {ids} ids and the model only {rows} rows: they do not belong "
                f"together"
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.chat_template = chat_template or ChatTemplate.load(None, tokenizer)
        ends = (tokenizer.eod_id, tokenizer.eos_id, self.chat_template.turn_end())
        self.end_ids = frozenset({*end_ids, *(token for token in ends if token is not None)})
        self.engine = Engine(
            ModelRunner(model, start_id=start_id),
            max_sequences=max_sequences,
            max_batch_tokens=max_batch_tokens,
            vocab_size=ids,
        )

    @staticmethod
    def from_checkpoint(
        path: str | Path,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        chat_template: str | Path | None = None,
        mesh: ParallelMesh | None = None,
        dtype: torch.dtype = torch.float32,
        kernels: KernelConfig | None = None,
        builders: Mapping[str, Builder] | None = None,
        max_sequences: int = 64,
        max_batch_tokens: int = 8192,
    ) -> LLM:
        """Load a checkpoint: a step folder, or a folder of them (then the newest committed one).

        The weights are read straight into the layout of the mesh, whatever layout they were trained
        in, and converted to `dtype`. All ranks of the mesh call it; metadata crosses `mesh.world`.

        Args:
            path: where the checkpoint lies. The one that rank 0 finds is taken, and its tokenizer.
            tokenizer: one, or where it lies, in place of the checkpoint's own.
            chat_template: a file with one, in place of the one in the tokenizer's folder.
            mesh: the ranks over which to cut the model; default this process alone, on the CPU.
            dtype: of weights and hidden states.
            kernels: which operators to use (default: the best that run on the device).
            builders: of parts of one's own, by pattern letter, as the model was trained with.
            max_sequences, max_batch_tokens: how much runs at a time; see `Engine`.

        Raises:
            FileNotFoundError: there is no committed checkpoint.
            ValueError: it has no architecture or no tokenizer, or what the constructor raises.
            mcore_ckpt.CheckpointError: it is damaged.
        """
        mesh = mesh or ParallelMesh.single()
        source = _together(lambda: _open(path, tokenizer, chat_template), mesh.world)
        model = build_model(
            source.config, mesh, kernels=kernels, dtype=dtype, builders=builders, key=None
        )
        load_weights(model, source.folder)
        limits = {"max_sequences": max_sequences, "max_batch_tokens": max_batch_tokens}
        return _assembled(model, source, limits)

    @staticmethod
    def from_hf(
        folder: str | Path,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        chat_template: str | Path | None = None,
        mesh: ParallelMesh | None = None,
        dtype: torch.dtype = torch.float32,
        kernels: KernelConfig | None = None,
        architectures: Mapping[str, Architecture] = ARCHITECTURES,
        max_sequences: int = 64,
        max_batch_tokens: int = 8192,
    ) -> LLM:
        """Load a Hugging Face folder: `config.json`, safetensors files, `tokenizer.json`.

        Each rank reads only its own bytes of the weights, straight into the layout of the mesh, and
        converts them to `dtype`. All ranks of the mesh call it, and all see the folder.

        Args:
            folder: where it lies.
            tokenizer: one, or where it lies, in place of the folder's own.
            chat_template: a file with one, in place of the folder's own.
            mesh: the ranks over which to cut the model; default this process alone, on the CPU.
            dtype: of weights and hidden states.
            kernels: which operators to use (default: the best that run on the device).
            architectures: by the name in `config.json`; those that installed packages register are
                known besides.
            max_sequences, max_batch_tokens: how much runs at a time; see `Engine`.

        Raises:
            FileNotFoundError: there is no `config.json`, or there are no tensors.
            ValueError: the architecture is unknown, a field not supported, or a tensor does not
                fit, naming file and field; or what the constructor raises.
            mcore_ckpt.CheckpointError: a file is missing or damaged.
        """
        mesh = mesh or ParallelMesh.single()
        source = _together(
            lambda: _open_hf(folder, architectures, tokenizer, chat_template), mesh.world
        )
        model = build_model(source.config, mesh, kernels=kernels, dtype=dtype, key=None)
        load_hf(folder, model_tensors(model), mesh.world, known=architectures)
        limits = {"max_sequences": max_sequences, "max_batch_tokens": max_batch_tokens}
        return _assembled(model, source, limits)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Return one completion per prompt, in order; `n` in a row where its parameters say so.

        Args:
            prompts: a text, or several texts or lists of tokens; they are generated together.
            params: one for all, or one per prompt; default `SamplingParams()`.

        Raises:
            ValueError: a prompt is empty, too long or has a token outside the vocabulary, or the
                numbers of prompts and params differ.
            FloatingPointError: the model's logits are not numbers.
        """
        asked: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        if any(isinstance(prompt, int) for prompt in asked):
            raise ValueError("prompts holds bare tokens: a prompt of tokens is a list in the list")
        rules = list(params) if isinstance(params, Sequence) else [params or SamplingParams()]
        if not isinstance(params, Sequence):
            rules *= len(asked)
        if len(rules) != len(asked):
            raise ValueError(
                f"{len(asked)} prompts and {len(rules)} sampling parameters: give one, or one each"
            )
        samples = [
            [self.request(prompt, one) for one in rule.each()]
            for prompt, rule in zip(asked, rules, strict=True)
        ]
        self.engine.check_each([group[0] for group in samples])
        self.engine.run([request for group in samples for request in group])
        texts = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in asked]
        return [
            completion(self.tokenizer, text, request)
            for text, group in zip(texts, samples, strict=True)
            for request in group
        ]

    def update_weights(self, link: WeightLink, *, version: int | None = None) -> int:
        """Take over the weights at the other end of `link`, in place; see `Engine.update_weights`.

        link = WeightLink(model_tensors(trained), llm.model, group)  # planned once
        llm.update_weights(link)  # as often as the trained model has changed
        """
        return self.engine.update_weights(link, version=version)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text to be continued, with those that the model expects before.

        Or of one to be read by an encoder: with the token that ends a text behind them.
        """
        end = self.tokenizer.eos_id if self.engine.runner.reads_source else None
        after = [] if end is None else [end]
        return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(text), *after]

    def request(self, prompt: Prompt, params: SamplingParams, *, follow: bool = False) -> Request:
        """Return what `Engine.add` takes for one sample of a prompt.

        `follow` has its text follow its tokens, as stop strings do in any case.
        """
        tokens = tuple(self.encode(prompt) if isinstance(prompt, str) else prompt)
        streams = follow or params.stop
        is_read = self.engine.runner.reads_source
        before = () if is_read else tokens
        text = TextStream(self.tokenizer, before, params.stop) if streams else None
        return Request(
            prompt=tokens, params=params, end_ids=self.end_ids, is_read=is_read, text=text
        )


def load_weights(model: GPT, checkpoint: str | Path) -> None:
    """Fill a model's parameters from a checkpoint, whatever layout it was saved under.

    All ranks of `model.mesh.world` call it.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        ValueError: its tensors do not fit the model, by name and shape.
        mcore_ckpt.CheckpointError: it is damaged.
    """
    tensors = {
        name: LayoutTensor(x.tensor, x.layout.renamed(_stored_name))
        for name, x in model_tensors(model).items()
    }
    mcore_ckpt.load(checkpoint, tensors, model.mesh.world, prefixes=("model/",))


def _stored_name(name: str) -> str:
    return f"model/{name}"


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What a checkpoint or a folder says besides its tensors."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    end_ids: tuple[int, ...]
    start_id: int


def _assembled(model: GPT, source: _Source, limits: dict[str, int]) -> LLM:
    return LLM(
        model,
        source.tokenizer,
        chat_template=source.chat_template,
        end_ids=source.end_ids,
        start_id=source.start_id,
        **limits,
    )


def _together(look: Callable[[], _Source], world: Group) -> _Source:
    """Return what rank 0 finds, or raise its error on every rank.

    One rank chooses: while a run still saves, the others might find a newer checkpoint.
    """
    found: _Source | Exception | None = None
    if world.rank == 0:
        try:
            found = look()
        except Exception as error:  # whatever it is: the others wait for an answer
            found = error
    found = broadcast_object(found, 0, world)
    if isinstance(found, Exception):
        raise found
    assert found is not None
    return found


def _open(
    path: str | Path,
    tokenizer: Tokenizer | str | Path | None,
    chat_template: str | Path | None,
) -> _Source:
    checkpoint = mcore_ckpt.open(path)
    folder = checkpoint.path
    if not isinstance(folder, Path):
        raise ValueError(
            f"{folder} is no directory: `mcore-ckpt reshard {folder} DIR` makes it one"
        )
    config = _architecture(folder, checkpoint.state)
    if tokenizer is None:
        tokenizer = folder / "files" / "tokenizer"
        if not tokenizer.is_dir():
            raise ValueError(f"{folder} has no tokenizer in it: give one")
    tokenizer, chat = _talk(tokenizer, chat_template)
    return _Source(
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        chat_template=chat,
        end_ids=generation_ends(folder / "files" / "hf"),
        start_id=generation_start(folder / "files" / "hf"),
    )


def _open_hf(
    folder: str | Path,
    architectures: Mapping[str, Architecture],
    tokenizer: Tokenizer | str | Path | None,
    chat_template: str | Path | None,
) -> _Source:
    opened = HFFolder.open(folder, known=architectures)
    tokenizer, chat = _talk(opened.path if tokenizer is None else tokenizer, chat_template)
    return _Source(
        folder=opened.path,
        config=opened.model,
        tokenizer=tokenizer,
        chat_template=chat,
        end_ids=generation_ends(opened.path),
        start_id=generation_start(opened.path),
    )


def _talk(
    tokenizer: Tokenizer | str | Path, chat_template: str | Path | None
) -> tuple[Tokenizer, ChatTemplate]:
    place = None
    if isinstance(tokenizer, str | Path):
        place = Path(tokenizer) if Path(tokenizer).is_dir() else None
        tokenizer = load_tokenizer(tokenizer)
    return tokenizer, ChatTemplate.load(place, tokenizer, file=chat_template)


def generation_ends(folder: Path) -> tuple[int, ...]:
    """Return the ids that end a text according to the files of Hugging Face in a folder.

    `eos_token_id` of `generation_config.json`, or without that file of `config.json`: one or
    several, or none.
    """
    ends = _generation(folder, "eos_token_id")
    return tuple(ends if isinstance(ends, list) else [] if ends is None else [ends])


def generation_start(folder: Path) -> int:
    """Return the id from which a decoder that reads an encoder starts, `decoder_start_token_id`.

    Of the same files; 0, T5's padding, where they do not say.
    """
    return int(_generation(folder, "decoder_start_token_id") or 0)


def _generation(folder: Path, field: str) -> Any:
    """A field of the first of the two files that is there; None without it."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            try:
                return json.loads(path.read_bytes()).get(field)
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{path}: no JSON object ({error})") from None
    return None


def _architecture(folder: Path, state: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(**state["config"]["model"])
    except KeyError as error:
        raise ValueError(f"{folder} has no model architecture in it: no {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: its model architecture cannot be built: {error}") from None
