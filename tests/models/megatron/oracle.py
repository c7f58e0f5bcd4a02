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
    "rng": True,
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
        virtual_pipeline_model_parallel_size=None, padded_vocab_size=case["vocab"],
        vocab_size=case["vocab"], transformer_impl="local", attention_backend=AttnBackend.local,
        iteration=case["steps"], consumed_train_samples=case["steps"] * BATCH, optimizer="adam",
        world_size=case["world"], use_distributed_optimizer=True, decoder_first_pipeline_num_layers=
        None, decoder_last_pipeline_num_layers=None, pipeline_model_parallel_layout=None,
        ddp_bucket_size=case["bucket"],
    )  # fmt: skip


def make_model(case, dtype):
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
    model = GPTModel(
        config, spec, vocab_size=case["vocab"], max_sequence_length=LENGTH * 2,
        position_embedding_type=case["position"],
        share_embeddings_and_output_weights=case["tied"],
        pre_process=ps.is_pipeline_first_stage(), post_process=ps.is_pipeline_last_stage(),
    )  # fmt: skip
    return config, model


def forward_backward(model, ps):
    """One micro-batch through all stages, hidden states and their gradients sent by hand."""
    generator = torch.Generator().manual_seed(1)
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    tokens = torch.randint(0, inner.vocab_size, (BATCH, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    stages = dist.get_process_group_ranks(ps.get_pipeline_model_parallel_group())
    stage = stages.index(dist.get_rank())
    config = inner.config
    dtype = config.params_dtype
    hidden = None
    if stage > 0:
        length = LENGTH // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        hidden = torch.empty(length, BATCH, config.hidden_size, dtype=dtype)
        dist.recv(hidden, stages[stage - 1])
        hidden.requires_grad_()
        inner.set_input_tensor(hidden)
    out = model(tokens, positions, mask, labels=labels)
    loss = None
    if stage + 1 < len(stages):
        dist.send(out.detach().contiguous(), stages[stage + 1])
        grad = torch.empty_like(out)
        dist.recv(grad, stages[stage + 1])
        out.backward(grad)
    else:
        loss = out.float().mean()
        loss.backward()
    if hidden is not None:
        dist.send(hidden.grad.contiguous(), stages[stage - 1])
    return loss


def true_gradients(named, ps, model):
    """The mean over data-parallel replicas, before the library reduces it in place."""
    grads = {}
    dp = dist.get_world_size(ps.get_data_parallel_group())
    for name, parameter in named:
        grad = parameter.main_grad.detach().float().clone()
        expert = not getattr(parameter, "allreduce", True)
        group = ps.get_expert_data_parallel_group() if expert else ps.get_data_parallel_group()
        dist.all_reduce(grad, group=group)
        grads[name] = grad / dp
    return grads


def run_case(case, out, rank):
    from megatron.core import dist_checkpointing, tensor_parallel
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    ps.initialize_model_parallel(
        case["tp"], case["pp"], expert_model_parallel_size=case["ep"],
        expert_tensor_parallel_size=case["tp"] if case["moe"] else None,
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed = lambda *a, **k: None
    dtype = torch.bfloat16 if case["bf16"] else torch.float32
    torch.manual_seed(5 + 100 * ps.get_pipeline_model_parallel_rank())
    config, inner = make_model(case, dtype)
    torch.manual_seed(6 + ps.get_pipeline_model_parallel_rank())
    for parameter in inner.parameters():  # not all ones and zeros
        if parameter.dim() == 1 and not getattr(parameter, "tensor_model_parallel", False):
            parameter.data.add_(torch.randn(parameter.shape).to(dtype) * 0.1)
        elif parameter.dim() == 1:
            whole = torch.randn(parameter.shape[0] * case["tp"]).to(dtype) * 0.1
            parameter.data.add_(whole.chunk(case["tp"])[ps.get_tensor_model_parallel_rank()])
    named = list(inner.named_parameters())
    held = {name: {"before": p.detach().clone()} for name, p in named}
    model = Float16Module(config, inner) if case["bf16"] else inner
    distributed = case["opt"] not in ("plain", "none")
    loss = None
    optimizer = None
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=distributed,
            overlap_grad_reduce=case["bucket"] is not None,
            bucket_size=case["bucket"],
            grad_reduce_in_fp32=True,
        ),
        model,
    )
    model.broadcast_params()
    if case["opt"] != "none":
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=ADAM["lr"], weight_decay=ADAM["weight_decay"],
                bf16=case["bf16"], params_dtype=dtype, clip_grad=0.0,
                use_distributed_optimizer=distributed,
            ),
            [model],
        )  # fmt: skip
    copies = {name: torch.nn.Parameter(p.detach().float().clone()) for name, p in named}
    adam = torch.optim.AdamW(list(copies.values()), **ADAM)
    summed = (case["tied"] and case["pp"] > 1) or (case["tp"] > 1 and case["moe"])
    for step in range(case["steps"]):
        model.zero_grad_buffer()
        with model.no_sync():
            loss_here = forward_backward(model, ps)
        grads = true_gradients(named, ps, model)
        if step == 0:
            loss = loss_here
            for name, _ in named:
                held[name]["grad"] = grads[name]
        if optimizer is None:
            break
        if case["bucket"] is not None:
            model.start_grad_sync()
        finalize_model_grads([model])
        optimizer.step()
        if summed:  # some of those gradients, in finalize_model_grads: the truth is not known
            continue
        for name, _ in named:
            copies[name].grad = grads[name]
        adam.step()
    for name, parameter in named:
        held[name]["after"] = parameter.detach().clone()
        if optimizer is not None and not summed:
            held[name]["param"] = copies[name].detach().clone()
            for moment in ("exp_avg", "exp_avg_sq"):
                held[name][moment] = adam.state[copies[name]][moment].clone()
    for name, buffer in inner.named_buffers():
        if buffer is not None:
            held[name] = {"after": buffer.detach().clone()}
    place = {
        "tp": ps.get_tensor_model_parallel_rank(), "pp": ps.get_pipeline_model_parallel_rank(),
        "ep": ps.get_expert_model_parallel_rank(), "loss": loss, "case": case,
        "first_layer": inner.decoder.layers[0].layer_number - 1,
    }  # fmt: skip
    torch.save({**place, "held": held}, out / f"{case['name']}.{rank}.pt")
    save(case, out / case["name"], inner, optimizer, ps, dist_checkpointing)
    dist.barrier()
    ps.destroy_model_parallel()


def rng_state():
    return {
        "random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(), "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
    }  # fmt: skip


def save(case, folder, inner, optimizer, ps, dist_checkpointing):
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
            state = {**common, "model": inner.state_dict_for_save_checkpoint()}
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
    state = {**common, "model": inner.sharded_state_dict(metadata=meta)}
    if optimizer is not None:
        options = {} if case["opt"] == "plain" else {"metadata": meta}
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], **options)
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
