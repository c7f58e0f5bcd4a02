"""Transports: the contract, finding them by name, and refusals with a reason."""

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from mcore_ckpt.live import GroupTransport, Transport, open_transport, transport
from mcore_ckpt.live.testing import FolderTransport, check_transport
from mcore_parallel.group import Group
from mcore_parallel.testing import RankPool


def check_folder(folder: Path) -> None:
    check_transport(lambda group: FolderTransport(group, folder), Group.world())


def check_named(name: str) -> None:
    check_transport(partial(open_transport, name), Group.world())


@pytest.mark.parametrize("world", [2, 3])
def test_gloo_keeps_the_contract(ranks: RankPool, world: int) -> None:
    ranks.run(check_named, world, "gloo")


def test_a_transport_through_files_keeps_the_contract(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_folder, 3, tmp_path)
    assert not list(tmp_path.iterdir())


class Swapping(GroupTransport):
    """Breaks the contract: the parts come in another order."""

    def exchange(self, outgoing, send_sizes, receive_sizes):  # type: ignore[no-untyped-def]
        received = super().exchange(outgoing, send_sizes, receive_sizes)
        return received.flip(0)


class Writing(GroupTransport):
    """Breaks the contract: it writes into what is sent."""

    def exchange(self, outgoing, send_sizes, receive_sizes):  # type: ignore[no-untyped-def]
        received = super().exchange(outgoing, send_sizes, receive_sizes)
        outgoing.zero_()
        return received


def refused_by_the_contract() -> list[str]:
    kinds: list[Callable[[Group, torch.device], Transport]] = [Swapping, Writing]
    errors = []
    for kind in kinds:
        try:
            check_transport(lambda g, kind=kind: kind(g, torch.device("cpu")), Group.world())
            errors.append("")
        except AssertionError as error:
            errors.append(str(error))
    return errors


def test_the_contract_finds_what_is_wrong(ranks: RankPool) -> None:
    for first, second in ranks.run(refused_by_the_contract, 2):
        assert "other bytes than were sent" in first
        assert "what is sent must not change" in second


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nixl", "'nixl' is not installed: it comes from a package that registers it under"),
        ("nvshmem", "'nvshmem' is not installed"),
        ("glo", r"no transport 'glo'; here are gloo, nccl \(nearest: gloo\)"),
    ],
)
def test_what_is_not_there_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_transport(name, Group.single())


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it can be used")
def test_nccl_without_a_gpu_says_what_to_use() -> None:
    with pytest.raises(ValueError, match="'nccl' cannot be used: it needs a CUDA"):
        open_transport("nccl", Group.single())


class PluginKind:
    """What a package would register: it can be used on even ranks alone."""

    def refusal(self, group: Group) -> str | None:
        return "no RDMA device on this host" if group.rank % 2 else None

    def open(self, group: Group) -> Transport:
        return GroupTransport(group.cpu, torch.device("cpu"))


PLUGIN = PluginKind()


def registered(name: str, *, group: str) -> list[EntryPoint]:
    assert group == "mcore_ckpt.transports"
    return [Entry(name, f"{__name__}:PLUGIN", group)]


class Entry(EntryPoint):
    def load(self) -> PluginKind:
        return PLUGIN


def with_a_plugin(ask: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "entry_points", partial(registered, "nixl"))
        try:
            check_transport(partial(open_transport, ask), Group.world())
        except ValueError as error:
            return str(error)
    return ""


def test_a_plugin_is_found_and_its_refusal_reaches_every_rank(ranks: RankPool) -> None:
    for error in ranks.run(with_a_plugin, 2, "nixl"):
        assert "'nixl' cannot be used: no RDMA device on this host" in error
    for error in ranks.run(with_a_plugin, 2, "nvshmem"):
        assert "here are gloo, nccl, nixl" in error


def test_a_plugin_that_does_not_refuse_is_used() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "entry_points", partial(registered, "nixl"))
        assert isinstance(open_transport("nixl", Group.single()), GroupTransport)


def different_names() -> str:
    group = Group.world()
    try:
        open_transport("gloo" if group.rank else "mine", group)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_ask_for_different_transports(ranks: RankPool) -> None:
    for error in ranks.run(different_names, 2):
        assert "no transport 'mine'" in error
