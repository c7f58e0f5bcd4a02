"""Generation with experts: in one process, and dealt out over the ranks of tp."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_inference import LLM, Completion, SamplingParams
from mcore_models import MoEConfig, build_model
from mcore_parallel import ParallelConfig, ParallelMesh, RngKey
from mcore_parallel.testing import RankPool

sys.path.append(str(Path(__file__).parent))
from small_models import LLAMA, PROMPTS, greedy_without_cache, save_checkpoint

MOE = replace(LLAMA, moe=MoEConfig(num_experts=4, top_k=2, expert_ffn_size=24))
RULES = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "checkpoints"
    save_checkpoint(build_model(MOE, key=RngKey(3)), folder)
    return folder


def generate(path: Path, layout: str) -> list[Completion]:
    mesh = ParallelMesh.create(ParallelConfig.parse(layout))
    assert mesh is not None
    # Together, then one sequence: while decoding it, a rank of tp has no token to route.
    llm = LLM.from_checkpoint(path, mesh=mesh)
    found = [*llm.generate(PROMPTS, RULES), *llm.generate(PROMPTS[:1], RULES)]
    mesh.close()
    return found


def test_generation_equals_the_whole_pass(checkpoint: Path) -> None:
    """Tokens are routed alone: what else is in the batch, and the cache, make no difference."""
    model = build_model(MOE, key=RngKey(3)).eval()
    for done, prompt in zip(LLM.from_checkpoint(checkpoint).generate(PROMPTS, RULES), PROMPTS,
                            strict=True):  # fmt: skip
        assert done.token_ids == greedy_without_cache(model, list(prompt.encode()), 8)[0]


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,ep=2,etp=1"])
def test_ranks_generate_the_same(ranks: RankPool, checkpoint: Path, layout: str) -> None:
    llm = LLM.from_checkpoint(checkpoint)
    want = [done.token_ids for done in llm.generate(PROMPTS, RULES)]
    want.append(want[0])
    for found in ranks.run(generate, 2, checkpoint, layout, timeout=120):
        assert [done.token_ids for done in found] == want
