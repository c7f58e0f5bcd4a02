"""A model and its tokenizer as one object that answers prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import mcore_ckpt
from mcore_data import Tokenizer, load_tokenizer
from mcore_inference.engine import Engine
from mcore_inference.request import Completion, Request
from mcore_inference.runner import ModelRunner
from mcore_inference.sampling import SamplingParams
from mcore_kernels import KernelConfig
from mcore_models import GPT, ModelConfig, build_model
from mcore_parallel import LayoutTensor, ParallelMesh


class LLM:
    """Text in, text out.

        llm = LLM.from_checkpoint("runs/quickstart/checkpoints")
        print(llm.generate("def ", SamplingParams(max_tokens=32))[0].text)

    With a mesh of several ranks (tp), all of them construct it and make the same calls, and all get
    the same answers.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, *, mesh: ParallelMesh | None = None
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        learned = model.config.position == "learned"
        self.engine = Engine(
            ModelRunner(model, mesh or ParallelMesh.single()),
            max_positions=model.config.max_positions if learned else None,
        )

    @staticmethod
    def from_checkpoint(
        path: str | Path,
        *,
        mesh: ParallelMesh | None = None,
        dtype: torch.dtype = torch.float32,
        kernels: KernelConfig | None = None,
    ) -> LLM:
        """Load a checkpoint: a step folder, or a folder of them (then the newest committed one).

        The weights are read straight into the layout of `mesh` (default: one process on the CPU),
        whatever layout they were trained in, and converted to `dtype`.

        Raises:
            ValueError: no committed checkpoint there, or one without architecture or tokenizer.
        """
        checkpoint = mcore_ckpt.open(path)
        try:
            config = ModelConfig(**checkpoint.state["config"]["model"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{checkpoint.path}: no model architecture in it ({error})") from None
        tokenizer = load_tokenizer(checkpoint.path / "files" / "tokenizer")
        mesh = mesh or ParallelMesh.single()
        model = build_model(config, mesh, kernels=kernels or KernelConfig(), dtype=dtype, key=None)
        load_weights(model, checkpoint.path, mesh)
        return LLM(model, tokenizer, mesh=mesh)

    def generate(
        self,
        prompts: str | Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Return one completion per prompt, in order.

        Args:
            prompts: one text or several; they are generated together.
            params: one for all, or one per prompt; default `SamplingParams()`.

        Raises:
            ValueError: a prompt is empty or too long, or the numbers of prompts and params differ.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not isinstance(params, Sequence):
            params = [params or SamplingParams()] * len(texts)
        if len(params) != len(texts):
            raise ValueError(
                f"{len(texts)} prompts and {len(params)} sampling parameters: give one, or "
                f"{len(texts)}"
            )
        tokenizer = self.tokenizer
        ends = frozenset(i for i in (tokenizer.eod_id, tokenizer.eos_id) if i is not None)
        requests = [
            Request(prompt=tuple(tokenizer.encode(text)), params=rule, eos_ids=ends)
            for text, rule in zip(texts, params, strict=True)
        ]
        self.engine.run(requests)
        return [
            self._completion(text, request) for text, request in zip(texts, requests, strict=True)
        ]

    def _completion(self, text: str, request: Request) -> Completion:
        assert request.finish_reason is not None
        # The completion is what the whole text has more than the prompt: a piece at the seam may
        # decode differently alone (byte pieces, leading spaces).
        before = self.tokenizer.decode(list(request.prompt))
        after = self.tokenizer.decode([*request.prompt, *request.tokens])
        whole = after.startswith(before)
        return Completion(
            prompt=text,
            text=after[len(before) :] if whole else self.tokenizer.decode(request.tokens),
            prompt_token_ids=request.prompt,
            token_ids=tuple(request.tokens),
            logprobs=tuple(request.logprobs),
            finish_reason=request.finish_reason,
        )


def load_weights(model: GPT, checkpoint: str | Path, mesh: ParallelMesh) -> None:
    """Fill a model's parameters from a checkpoint, by layout; all ranks of the mesh call it."""
    specs = model.specs()
    tensors = {
        name: LayoutTensor(parameter.data, specs[name].layout.renamed(_model_name))
        for name, parameter in model.named_parameters()
    }
    mcore_ckpt.load(checkpoint, tensors, mesh.world, prefixes=("model/",))


def _model_name(name: str) -> str:
    return f"model/{name}"
