"""A model and its tokenizer as one object that answers prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from pathlib import Path

import torch

import mcore_ckpt
from mcore_ckpt.hf import load_hf
from mcore_data import ChatTemplate, Tokenizer
from mcore_inference.engine import Engine
from mcore_inference.output import completion
from mcore_inference.request import Completion, Request
from mcore_inference.runner import ModelRunner
from mcore_inference.sampling import SamplingParams
from mcore_inference.source import Source, on_first_rank, open_checkpoint, open_hf
from mcore_inference.text import TextStream
from mcore_inference.weights import WeightLink, model_tensors
from mcore_kernels import KernelConfig
from mcore_models import GPT, Builder, build_model
from mcore_models.hf import ARCHITECTURES, Architecture
from mcore_parallel import LayoutTensor, ParallelMesh

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
            path: where the checkpoint lies: a path, or an address in object storage, such as
                `s3://bucket/run`. The one that rank 0 finds is taken, and its tokenizer.
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
        source = on_first_rank(
            lambda: open_checkpoint(path, tokenizer, chat_template, mesh.world.size), mesh.world
        )
        model = build_model(
            source.config, mesh, kernels=kernels, dtype=dtype, builders=builders, key=None
        )
        load_weights(model, source.place)
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
        source = on_first_rank(
            lambda: open_hf(folder, architectures, tokenizer, chat_template), mesh.world
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
        try:
            tokens = tuple(map(index, self.encode(prompt) if isinstance(prompt, str) else prompt))
        except TypeError as error:
            raise ValueError(f"a prompt is a text or a list of tokens: {error}") from None
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


def _assembled(model: GPT, source: Source, limits: dict[str, int]) -> LLM:
    return LLM(
        model,
        source.tokenizer,
        chat_template=source.chat_template,
        end_ids=source.end_ids,
        start_id=source.start_id,
        **limits,
    )
