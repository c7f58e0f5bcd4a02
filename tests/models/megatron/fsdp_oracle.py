"""`fsdp_dtensor` checkpoints written by Megatron-FSDP of megatron-core itself, on CPU with gloo.

    python fsdp_oracle.py CASES.json OUT          needs einops, too

As `oracle.py`: OUT/<name>/ holds the checkpoint, OUT/<name>.<rank>.0.pt what the ranks held. The
model is sharded and trained by Megatron-FSDP (ZeRO-3), its state taken, cut and written by the
functions of the library that Megatron-LM's training calls, in that order. Two things are not as on
GPUs: sums in place of means of gradients (gloo has no scaled sum), and the optimizer gets moments
of what a rank holds no element of, which torch's AdamW leaves out and Apex's does not.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import oracle
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


class Nothing:
    """A stream, or an event: everything is done at once."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: Nothing()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def on_cpu():
    oracle.on_cpu()
    torch.cuda.Stream = torch.cuda.Event = Nothing
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = torch.cuda.default_stream = Nothing
    torch.cuda.memory_allocated = lambda *_: 0
    torch.Tensor.record_stream = lambda self, stream: None
    dist._make_nccl_premul_sum = lambda factor: dist.ReduceOp.SUM
    real = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(
        lambda group, device_type, *args, **kwargs: real(group, "cpu", *args, **kwargs)
    )


def make(case):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    torch.manual_seed(5)
    config, inner = oracle.make_model(case, torch.float32, 0)
    torch.manual_seed(6)
    for parameter in inner.parameters():  # not all ones and zeros
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=1000,
    )
    model = FullyShardedDataParallel(config, ddp, inner, device="cpu")
    options = {"lr": oracle.ADAM["lr"], "weight_decay": oracle.ADAM["weight_decay"]}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", clip_grad=0.0, use_distributed_optimizer=True, **options),
        [model],
    )
    return model, optimizer


def train(case, model, optimizer):
    for step in range(case["steps"]):
        model.zero_grad_buffer()
        generator = torch.Generator().manual_seed(step)
        shape = (oracle.BATCH, oracle.LENGTH)
        tokens = torch.randint(0, case["vocab"], shape, generator=generator)
        positions = torch.arange(oracle.LENGTH).expand(oracle.BATCH, -1)
        mask = torch.triu(torch.ones(1, 1, oracle.LENGTH, oracle.LENGTH, dtype=torch.bool), 1)
        model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        every = [p for group in one.optimizer.param_groups for p in group["params"]]
        state = {p: one.optimizer.state.get(p) or empty(p, case["steps"]) for p in every}
        one.optimizer.state.clear()
        one.optimizer.state.update(state)


def empty(parameter, steps):
    zeros = torch.zeros_like(parameter)
    return {"step": torch.tensor(float(steps)), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def held(model, state, ps):
    """What the ranks hold, put together by the slices that the parameters say they are."""

    def whole(value, parameter, name):
        expert = ".experts." in name
        group = ps.get_expert_data_parallel_group() if expert else ps.get_data_parallel_group()
        parts = [None] * dist.get_world_size(group)
        own = (parameter.megatron_fsdp_slice.start, value.to_local().flatten().clone())
        dist.all_gather_object(parts, own, group=group)
        full = torch.full((value.numel(),), float("nan"))
        for start, part in parts:
            full[start : start + part.numel()] = part
        assert not full.isnan().any(), name
        return full.view(value.shape)

    found = {}
    for key, value in state["model"].items():
        if isinstance(value, DTensor):
            name, parameter = key.removeprefix("module."), model.get_parameter(f"module.{key}")
            found[name] = {"after": whole(value, parameter, name)}
            for one in model.optimizers:
                if parameter in one.optimizer.state:
                    for kind in ("exp_avg", "exp_avg_sq"):
                        moment = one.optimizer.state[parameter][kind]
                        found[name][kind] = whole(moment, parameter, name)
    return found


def save(case, model, optimizer, folder):
    """Write what Megatron-LM's `preprocess_fsdp_dtensor_state_dict` and its saving make of it."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as theirs

    meta = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    state = {"args": oracle.make_args(case), "checkpoint_version": 3.0, "iteration": case["steps"]}
    state["model"] = model.state_dict_for_save_checkpoint()
    state["optimizer"] = optimizer.sharded_state_dict({}, metadata=meta)
    theirs.handle_fp8_extra_state_case(state["model"])
    if case["swiglu"]:  # each half of it goes by the names of another wrapper
        state["model"], _ = theirs.handle_swiglu_in_state_dict(model, state["model"], None)
        optim = state["optimizer"]
        _, state["optimizer"] = theirs.handle_swiglu_in_state_dict(model.module, {}, optim)
    if case["moe"]:
        experts = theirs.handle_experts_in_state_dict(state["model"], case["experts"])
        state["model"] = experts
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
    dcp.save(state_dict=state, storage_writer=dcp.FileSystemWriter(str(folder)))


def run_case(case, out, rank):
    from megatron.core import parallel_state as ps

    expert = {"expert_tensor_parallel_size": 1} if case["moe"] else {}
    ps.initialize_model_parallel(1, 1, expert_model_parallel_size=case["ep"], **expert)
    model, optimizer = make(case)
    train(case, model, optimizer)
    model.optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    values = held(model, {"model": model.state_dict_for_save_checkpoint()}, ps)
    folder = out / case["name"] / f"iter_{case['steps']:07}"
    if rank == 0:
        folder.mkdir(parents=True)
        tracker = folder.parent / "latest_checkpointed_iteration.txt"
        tracker.write_text(str(case["steps"]))
    place = {
        "tp": 0, "pp": 0, "ep": ps.get_expert_model_parallel_rank() if case["moe"] else 0,
        "loss": None, "case": case, "held": values, "first_layer": 0,
    }  # fmt: skip
    torch.save(place, out / f"{case['name']}.{rank}.0.pt")
    dist.barrier()
    save(case, model, optimizer, folder)
    dist.barrier()
    ps.destroy_model_parallel()


def work(rank, cases, out, world, port):
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
    )  # fmt: skip
    dist.init_process_group("gloo", rank=rank, world_size=world)
    on_cpu()
    for case in cases:
        run_case(case, out, rank)
    dist.destroy_process_group()


def main():
    cases = [{**oracle.DEFAULTS, **case} for case in json.loads(Path(sys.argv[1]).read_text())]
    for case in cases:
        case["world"] = 2
    from socket import socket

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(work, (cases, Path(sys.argv[2]), 2, port), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main()
