"""Checkpoints written by megatron-core itself on CPU with gloo, and what was in memory then.

    python oracle.py CASES.json OUT

One process for each rank of the largest case. For each case OUT/<name>/ holds the checkpoint, and
OUT/<name>.<rank>.pt what the rank held: for each of its parameters, by its local name, the value
before and after the steps, its gradient at the first of them and both moments of Adam, computed by
torch's own AdamW on a copy.
"""

import argparse
import contextlib
import copy
import datetime
import json
import os
import random
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

DEFAULTS = {
    "tp": 1, "pp": 1, "ep": 1, "dp": 1, "format": "torch_dist", "opt": "none", "moe": False,
    "bf16": False, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 32,
    "bias": False, "norm": "RMSNorm", "swiglu": True, "position": "rope", "tied": False,
    "qk_norm": False, "singleton": False, "steps": 2, "experts": 4, "top_k": 2, "grouped": False,
    "shared": 0, "bucket": None, "sigmoid": False, "moe_freq": 1, "qkv_bias": False, "moe_ffn": 8,
    "rng": True, "vp": 1,
}  # fmt: skip
LENGTH, BATCH = 8, 2
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}


class CudaIsCpu(TorchFunctionMode):
    """What asks for a CUDA device gets the CPU, and is told that it is CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.is_cuda.__get__:
            return True

        def cpu(value):
            named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
            return "cpu" if named else value

        args = tuple(cpu(value) for value in args)
        kwargs = {key: cpu(value) for key, value in kwargs.items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)


def on_cpu():
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = lambda *a, **k: contextlib.nullcontext()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.empty_cache = lambda: None
    import megatron.core.tensor_parallel.random as mrandom
    import megatron.core.transformer.moe.moe_utils as moe_utils

    mrandom.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    CudaIsCpu().__enter__()


def make_args(case):
    """The namespace of arguments that Megatron-LM's training would have stored."""
    from megatron.core.transformer.enums import AttnBackend

    moe = case["moe"]
    return argparse.Namespace(
        num_layers=case["layers"], hidden_size=case["hidden"], ffn_hidden_size=case["ffn"],
        num_attention_heads=case["heads"], group_query_attention=case["kv_heads"] != case["heads"],
        num_query_groups=case["kv_heads"], kv_channels=case["hidden"] // case["heads"],
        max_position_embeddings=LENGTH * 2, seq_length=LENGTH, norm_epsilon=1e-5,
        normalization=case["norm"], swiglu=case["swiglu"], add_bias_linear=case["bias"],
        add_qkv_bias=case["qkv_bias"], qk_layernorm=case["qk_norm"], openai_gelu=False,
        bias_gelu_fusion=False, position_embedding_type=case["position"], rotary_base=10000,
        rotary_percent=1.0, rotary_interleaved=False, use_rope_scaling=False, squared_relu=False,
        untie_embeddings_and_output_weights=not case["tied"], init_method_std=0.02,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16,
        apply_layernorm_1p=False, multi_latent_attention=False, mtp_num_layers=None,
        num_experts=case["experts"] if moe else None, moe_router_topk=case["top_k"],
        moe_ffn_hidden_size=case["moe_ffn"] if moe else None, moe_layer_freq=case["moe_freq"],
        moe_router_score_function="sigmoid" if case["sigmoid"] else "softmax",
        moe_router_pre_softmax=False, moe_router_enable_expert_bias=case["sigmoid"],
        moe_router_bias_update_rate=1e-3, moe_router_num_groups=None,
        moe_router_group_topk=None, moe_router_topk_scaling_factor=None, moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None, moe_shared_expert_intermediate_size=case["shared"] or None,
        moe_router_load_balancing_type="none", moe_grouped_gemm=case["grouped"],
        tensor_model_parallel_size=case["tp"], pipeline_model_parallel_size=case["pp"],
        expert_model_parallel_size=case["ep"], expert_tensor_parallel_size=case["tp"],
        virtual_pipeline_model_parallel_size=case["vp"] if case["vp"] > 1 else None,
        padded_vocab_size=case["vocab"],
        vocab_size=case["vocab"], transformer_impl="local", attention_backend=AttnBackend.local,
        iteration=case["steps"], consumed_train_samples=case["steps"] * BATCH, optimizer="adam",
        world_size=case["world"], use_distributed_optimizer=True, decoder_first_pipeline_num_layers=
        None, decoder_last_pipeline_num_layers=None, pipeline_model_parallel_layout=None,
        ddp_bucket_size=case["bucket"],
    )  # fmt: skip


def make_model(case, dtype, chunk):
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe = {}
    if case["moe"]:
        moe = {
            "num_moe_experts": case["experts"], "moe_router_topk": case["top_k"],
            "moe_grouped_gemm": case["grouped"], "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
            "moe_ffn_hidden_size": case["moe_ffn"], "expert_model_parallel_size": case["ep"],
            "moe_shared_expert_intermediate_size": case["shared"] or None,
            "moe_router_score_function": "sigmoid" if case["sigmoid"] else "softmax",
            "moe_router_enable_expert_bias": case["sigmoid"], "moe_layer_freq": case["moe_freq"],
            "sequence_parallel": case["tp"] > 1,
        }  # fmt: skip
    config = TransformerConfig(
        num_layers=case["layers"], hidden_size=case["hidden"], num_attention_heads=case["heads"],
        num_query_groups=case["kv_heads"], gated_linear_unit=case["swiglu"],
        activation_func=torch.nn.functional.silu if case["swiglu"] else torch.nn.functional.gelu,
        normalization=case["norm"], ffn_hidden_size=case["ffn"], add_bias_linear=case["bias"],
        add_qkv_bias=case["qkv_bias"], qk_layernorm=case["qk_norm"], use_cpu_initialization=True,
        pipeline_dtype=dtype, params_dtype=dtype, bf16=case["bf16"], hidden_dropout=0.0,
        attention_dropout=0.0, bias_dropout_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        tensor_model_parallel_size=case["tp"], pipeline_model_parallel_size=case["pp"],
        virtual_pipeline_model_parallel_size=case["vp"] if case["vp"] > 1 else None,
        init_method_std=0.3, **moe,
    )  # fmt: skip
    if isinstance(case["moe_freq"], list):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=case["experts"] if case["moe"] else None,
            moe_grouped_gemm=case["grouped"],
            normalization=case["norm"],
            qk_layernorm=case["qk_norm"],
        )
    stage = {"vp_stage": chunk if case["vp"] > 1 else None}
    whole = {"ignore_virtual": case["vp"] == 1, **stage}
    model = GPTModel(
        config, spec, vocab_size=case["vocab"], max_sequence_length=LENGTH * 2,
        position_embedding_type=case["position"],
        share_embeddings_and_output_weights=case["tied"],
        pre_process=ps.is_pipeline_first_stage(**whole),
        post_process=ps.is_pipeline_last_stage(**whole), **stage,
    )  # fmt: skip
    return config, model


class Chunk:
    """A chunk of a pipeline stage, what it held, and a copy of it that torch's AdamW trains."""

    def __init__(self, case, number, dtype, ps):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        stage = ps.get_pipeline_model_parallel_rank()
        torch.manual_seed(5 + 100 * stage + 1000 * number)
        self.config, self.inner = make_model(case, dtype, number)
        torch.manual_seed(6 + stage + 1000 * number)
        for parameter in self.inner.parameters():  # not all ones and zeros
            cut = case["tp"] if getattr(parameter, "tensor_model_parallel", False) else 1
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape[0] * cut).to(dtype) * 0.1
                rank = ps.get_tensor_model_parallel_rank() if cut > 1 else 0
                parameter.data.add_(noise.chunk(cut)[rank])
        self.named = list(self.inner.named_parameters())
        self.held = {name: {"before": p.detach().clone()} for name, p in self.named}
        self.model = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=case["opt"] not in ("plain", "none"),
                overlap_grad_reduce=case["bucket"] is not None,
                bucket_size=case["bucket"],
                grad_reduce_in_fp32=True,
            ),
            Float16Module(self.config, self.inner) if case["bf16"] else self.inner,
        )
        self.model.broadcast_params()
        copies = {name: p.detach().float().clone() for name, p in self.named}
        self.copies = {name: torch.nn.Parameter(own) for name, own in copies.items()}
        self.adam = torch.optim.AdamW(list(self.copies.values()), **ADAM)

    def forward(self, hidden):
        """Run the chunk on hidden states, or on the tokens that all cases take."""
        if hidden is not None:
            self.inner.set_input_tensor(hidden)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, self.inner.vocab_size, (BATCH, LENGTH), generator=generator)
        positions = torch.arange(LENGTH).expand(BATCH, -1)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
        return self.model(tokens, positions, mask, labels=tokens.roll(-1, 1))

    def gradients(self, case, ps):
        """The mean over data-parallel replicas, before the library reduces it in place."""
        grads = {}
        dp = dist.get_world_size(ps.get_data_parallel_group())
        for name, parameter in self.named:
            grad = parameter.main_grad.detach().float().clone()
            expert = not getattr(parameter, "allreduce", True)
            group = ps.get_expert_data_parallel_group() if expert else ps.get_data_parallel_group()
            dist.all_reduce(grad, group=group)
            shared = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            if case["tied"] and case["pp"] > 1 and shared:
                dist.all_reduce(grad, group=ps.get_embedding_group())
            grads[name] = grad / dp
        return grads

    def train_copy(self, grads):
        """One step of torch's AdamW."""
        for name, own in self.copies.items():
            own.grad = grads[name]
        self.adam.step()

    def record(self, trained):
        """Take note of what it holds now."""
        for name, parameter in self.named:
            self.held[name]["after"] = parameter.detach().clone()
            if trained:
                self.held[name]["param"] = self.copies[name].detach().clone()
                for moment in ("exp_avg", "exp_avg_sq"):
                    value = self.adam.state[self.copies[name]][moment]
                    self.held[name][moment] = value.clone()
        for name, buffer in self.inner.named_buffers():
            if buffer is not None:
                self.held[name] = {"after": buffer.detach().clone()}


def forward_backward(chunks, ps):
    """One micro-batch through all chunks of all stages; what crosses ranks is sent by hand."""
    stages = dist.get_process_group_ranks(ps.get_pipeline_model_parallel_group())
    stage, count = stages.index(dist.get_rank()), len(stages)
    before, after = stages[stage - 1], stages[(stage + 1) % count]
    config = chunks[0].config
    inputs, outputs = [], []
    for number, chunk in enumerate(chunks):
        hidden = None
        if stage > 0 or number > 0:
            hidden = torch.empty(LENGTH, BATCH, config.hidden_size, dtype=config.params_dtype)
            dist.recv(hidden, before)
            hidden.requires_grad_()
        inputs.append(hidden)
        outputs.append(chunk.forward(hidden))
        if stage + 1 < count or number + 1 < len(chunks):
            dist.send(outputs[-1].detach().contiguous(), after)
    loss = None
    for number in reversed(range(len(chunks))):
        if stage + 1 < count or number + 1 < len(chunks):
            grad = torch.empty_like(outputs[number])
            dist.recv(grad, after)
            outputs[number].backward(grad)
        else:
            loss = outputs[number].float().mean()
            loss.backward()
        if inputs[number] is not None:
            dist.send(inputs[number].grad.contiguous(), before)
    return loss


def make_optimizer(case, chunks, dtype):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if case["opt"] == "none":
        return None
    config = OptimizerConfig(
        optimizer="adam", lr=ADAM["lr"], weight_decay=ADAM["weight_decay"], bf16=case["bf16"],
        params_dtype=dtype, clip_grad=0.0, use_distributed_optimizer=case["opt"] != "plain",
    )  # fmt: skip
    return get_megatron_optimizer(config, [chunk.model for chunk in chunks])


def train(case, chunks, optimizer, ps):
    """Make the steps, on the copies too; return the first loss."""
    from megatron.core.distributed import finalize_model_grads

    first = None
    for step in range(case["steps"] if optimizer is not None else 1):
        for chunk in chunks:
            chunk.model.zero_grad_buffer()
        with contextlib.ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.model.no_sync())
            loss = forward_backward(chunks, ps)
        grads = [chunk.gradients(case, ps) for chunk in chunks]
        if step == 0:
            first = loss
            for chunk, own in zip(chunks, grads, strict=True):
                for name, grad in own.items():
                    chunk.held[name]["grad"] = grad
        if optimizer is None:
            break
        if case["bucket"] is not None:
            for chunk in chunks:
                chunk.model.start_grad_sync()
        finalize_model_grads([chunk.model for chunk in chunks])
        optimizer.step()
        for chunk, own in zip(chunks, grads, strict=True):
            chunk.train_copy(own)
    return first


def run_case(case, out, rank):
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(
        case["tp"], case["pp"], expert_model_parallel_size=case["ep"],
        virtual_pipeline_model_parallel_size=case["vp"] if case["vp"] > 1 else None,
        expert_tensor_parallel_size=case["tp"] if case["moe"] else None,
    )  # fmt: skip
    dtype = torch.bfloat16 if case["bf16"] else torch.float32
    chunks = [Chunk(case, number, dtype, ps) for number in range(case["vp"])]
    optimizer = make_optimizer(case, chunks, dtype)
    loss = train(case, chunks, optimizer, ps)
    for number, chunk in enumerate(chunks):
        chunk.record(optimizer is not None)
        place = {
            "tp": ps.get_tensor_model_parallel_rank(), "loss": loss, "case": case,
            "pp": ps.get_pipeline_model_parallel_rank(), "held": chunk.held,
            "ep": ps.get_expert_model_parallel_rank(),
            "first_layer": chunk.inner.decoder.layers[0].layer_number - 1,
        }  # fmt: skip
        torch.save(place, out / f"{case['name']}.{rank}.{number}.pt")
    inner = [chunk.inner for chunk in chunks]
    save(case, out / case["name"], inner, optimizer, ps, dist_checkpointing)
    dist.barrier()
    ps.destroy_model_parallel()


def rng_state():
    return {
        "random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(), "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
    }  # fmt: skip


def by_chunk(states):
    """State by the keys that Megatron-LM's training gives it."""
    if len(states) == 1:
        return {"model": states[0]}
    return {f"model{number}": state for number, state in enumerate(states)}


def save(case, folder, models, optimizer, ps, dist_checkpointing):
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    folder = folder / f"iter_{case['steps']:07}"
    first = dist.get_rank() == 0
    if first:
        folder.mkdir(parents=True)
        tracker = folder.parent / "latest_checkpointed_iteration.txt"
        tracker.write_text(str(case["steps"]))
    dist.barrier()
    common = {
        "args": make_args(case), "checkpoint_version": 3.0, "iteration": case["steps"],
        "num_floating_point_operations_so_far": 1e9,
    }  # fmt: skip
    tp, pp = ps.get_tensor_model_parallel_rank(), ps.get_pipeline_model_parallel_rank()
    dp = dist.get_rank(ps.get_data_parallel_group())
    if case["format"] == "torch":
        edp = dist.get_rank(ps.get_expert_data_parallel_group()) if case["moe"] else dp
        name = f"mp_rank_{tp:02}" + (f"_{pp:03}" if case["pp"] > 1 else "")
        if case["ep"] > 1:
            name += f"_{ps.get_expert_model_parallel_rank():03}"
        place = folder / name
        if edp == 0:
            place.mkdir(exist_ok=True)
            state = {**common, **by_chunk([m.state_dict_for_save_checkpoint() for m in models])}
            if optimizer is not None:
                state["optimizer"] = optimizer.state_dict()
            if case["rng"]:
                state["rng_state"] = [rng_state()]
            torch.save(state, place / "model_optim_rng.pt")
        dist.barrier()
        if case["opt"] == "distributed":
            place.mkdir(exist_ok=True)
            optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
        return
    meta = {
        "distrib_optim_sharding_type": case["opt"], "singleton_local_shards": case["singleton"],
        "chained_optim_avoid_prefix": True,
    }  # fmt: skip
    chunks = by_chunk([model.sharded_state_dict(metadata=meta) for model in models])
    state = {**common, **chunks}
    if optimizer is not None:
        options = {} if case["opt"] == "plain" else {"metadata": meta}
        whole = chunks if len(models) > 1 else chunks["model"]
        state["optimizer"] = optimizer.sharded_state_dict(whole, **options)
    if case["rng"]:
        state["rng_state"] = ShardedObject(
            "rng_state", [rng_state()], (case["pp"], case["tp"]), (pp, tp), replica_id=dp
        )
    dist_checkpointing.save(state, str(folder), content_metadata=meta)


def work(rank, cases, out, world, port):
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank)
    )
    on_cpu()
    store = dist.TCPStore(
        "127.0.0.1", port, world, rank == 0, timeout=datetime.timedelta(minutes=15)
    )
    for number, case in enumerate(cases):
        if rank < case["world"]:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(number), store),
                rank=rank,
                world_size=case["world"],
                timeout=datetime.timedelta(minutes=15),
            )
            run_case(copy.deepcopy(case), out, rank)
            dist.destroy_process_group()


def main():
    cases = [{**DEFAULTS, **case} for case in json.loads(Path(sys.argv[1]).read_text())]
    for case in cases:
        case["world"] = case["tp"] * case["pp"] * case["dp"]
    world = max(case["world"] for case in cases)
    from socket import socket

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer  # noqa: F401

    arguments = (cases, Path(sys.argv[2]), world, port)
    mp.start_processes(work, arguments, nprocs=world, start_method="fork")


if __name__ == "__main__":
    main()
