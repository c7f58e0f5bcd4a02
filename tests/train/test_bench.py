"""`mcore-train bench`: the numbers belong together, and nothing but the timed steps is in them."""

import json
from threading import Thread

import pytest
import torch

from mcore_models import flops_per_token
from mcore_parallel.testing import RankPool
from mcore_train.bench import BenchOptions, TimeSplit, bench, classify, matmul_rate
from mcore_train.bench.config import bench_config
from mcore_train.bench.run import bench_rank
from mcore_train.bench.split import split_step
from mcore_train.bench.text import describe
from mcore_train.cli import main
from mcore_train.load import config_from_tree, config_to_tree

CPU = torch.device("cpu")


def tiny(**batch: int):
    return config_from_tree(
        {
            "steps": 1,
            "model": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4},
            "data": {"mock": True, "seq_length": 16},
            "batch": {"micro_size": 1, "global_size": 2, **batch},
            "device": "cpu",
        }
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matmul"),
        ("weight_grad_kernel", "matmul"),
        ("_rows_kernel", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)", "matmul"),
        ("aten::addmm", "matmul"),
        ("_matmul_kernel", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>(…)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4>(…)", "memory_bound"),
        ("_rms_norm_forward", "memory_bound"),
        ("Memcpy DtoD (Device -> Device)", "memory_bound"),
    ],
)
def test_kernels_have_their_kind(name: str, kind: str) -> None:
    assert classify(name) == kind


def test_a_report_adds_up() -> None:
    config = tiny(global_size=4)
    report = bench(config, BenchOptions(warmup=1, steps=3))
    assert report.micro_batches == 4
    low, high = report.step_range
    assert 0 < low <= report.step_seconds <= high
    assert report.tokens_per_second == pytest.approx(4 * 16 / report.step_seconds)
    flops = flops_per_token(config.model, 16)
    assert report.model_flops == pytest.approx(report.tokens_per_second * flops)
    assert report.ratio == pytest.approx(report.model_flops / report.limits.matmul_flops)
    assert report.peak_bytes is None
    assert report.split is not None
    assert report.split.matmul > 0
    assert report.split.optimizer > 0
    assert report.split.communication == 0
    assert min(vars(report.split).values()) >= 0
    text = "\n".join(describe(report))
    assert "loss" in text
    assert "memory-bound" in text


def test_the_split_sees_what_runs() -> None:
    a = torch.randn(256, 256)

    def products() -> None:
        for _ in range(20):
            a @ a

    def sums() -> None:
        for _ in range(20):
            a + a

    split = split_step(products, sums, CPU)
    assert isinstance(split, TimeSplit)
    assert split.matmul > 10 * split.memory_bound
    assert split_step(sums, products, CPU).matmul == 0

    def elsewhere() -> None:
        thread = Thread(target=products)
        thread.start()
        thread.join()

    assert split_step(elsewhere, sums, CPU).matmul > 0  # as forwards do that are paired
    # Nor does it count what runs while it waits for other ranks.
    assert split_step(sums, sums, CPU, together=products).matmul == 0


def test_all_ranks_report_the_slowest(ranks: RankPool) -> None:
    tree = config_to_tree(tiny(global_size=4))
    options = BenchOptions(warmup=0, steps=2, split=False)
    first, second = ranks.run(bench_rank, 2, tree, options, timeout=120)
    assert first.step_range == second.step_range
    assert first.tokens_per_second == pytest.approx(2 * 16 / first.step_seconds)


def test_matmul_rate_counts_two_per_product() -> None:
    one, again = (matmul_rate(CPU, torch.float32, 256, repeats=5) for _ in range(2))
    assert min(one, again) > 1e8
    assert max(one, again) < 1e13


def test_the_config_of_a_preset() -> None:
    config = bench_config("llama3-8b-8layers", layout="tp=2,sp", world_size=4, micro_batches=3)
    assert config.model.num_layers == 8
    assert config.parallel.sequence_parallel
    assert config.batch.global_size == 6  # two replicas
    assert config.check_world(4).micro_batches == 3
    assert config.precision == "bf16"


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        (["--preset", "llama3-8b-8layer"], "did you mean 'llama3-8b-8layers'"),
        (["--preset", "gpt2", "--micro-batches", "0"], "--micro-batches 0 must be at least 1"),
        (["--preset", "gpt2", "--seq-length", "2048"], "use seq_length 1024 or less"),
        (["--preset", "gpt2", "--layout", "tp=2"], "nearest valid world sizes: 2"),
        (["--preset", "gpt2", "--steps", "0", "--seq-length", "8"], "steps=0 must be at least 1"),
        (["--preset", "gpt2", "--seq-length", "8", "--json", "no/a"], "--json no/a cannot be"),
    ]:
        assert main(["bench", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert message in err


def test_the_command_writes_a_row(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    sizes = ["--model.num_layers=1", "--model.vocab_size=128", "--model.hidden_size=96"]
    sizes += ["--model.ffn_size=64"]
    arguments = ["bench", "--preset", "smollm2-135m", "--precision=fp32", "--seq-length=8"]
    arguments += ["--steps=1", "--warmup=0", "--no-split", "--json", str(file), "--device", "cpu"]
    assert main([*arguments, *sizes, "--model.head_dim=32"]) == 0
    row = json.loads(file.read_text())
    assert row["preset"] == "smollm2-135m"
    assert row["split"] is None
    assert row["ratio"] == pytest.approx(row["model_flops"] / row["limits"]["matmul_flops"])
    assert "of the matmul rate" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    config = config_from_tree(
        {
            "steps": 1,
            "model": {"vocab_size": 512, "hidden_size": 256, "num_layers": 2, "num_heads": 4},
            "data": {"mock": True, "seq_length": 256},
            "batch": {"micro_size": 1, "global_size": 2},
            "precision": "bf16",
            "device": "cuda",
        }
    )
    report = bench(config, BenchOptions(warmup=2, steps=3))
    assert report.peak_bytes is not None
    assert report.peak_bytes > 0
    assert report.split is not None
    assert report.split.matmul > 0
    assert report.split.attention > 0
    assert report.split.memory_bound > 0
