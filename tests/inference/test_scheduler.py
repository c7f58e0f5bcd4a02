"""First come, first served, within the limits; nobody waits for ever."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_inference import Request, SamplingParams, Scheduler


def request(length: int) -> Request:
    return Request(prompt=(1,) * length, params=SamplingParams())


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), max_size=12),
    max_sequences=st.integers(1, 4),
    max_batch_tokens=st.integers(1, 12),
    data=st.data(),
)
def test_every_request_runs_in_its_turn(
    lengths: list[int], max_sequences: int, max_batch_tokens: int, data: st.DataObject
) -> None:
    scheduler = Scheduler(max_sequences=max_sequences, max_batch_tokens=max_batch_tokens)
    requests = [request(length) for length in lengths]
    for one in requests:
        scheduler.add(one)
    order: list[Request] = []
    for _ in range(4 * len(requests)):
        before = list(scheduler.running)
        admitted = scheduler.admit()
        order += admitted
        assert scheduler.running == before + admitted
        assert len(scheduler.running) <= max_sequences
        tokens = len(before) + sum(len(one.prompt) for one in admitted)
        assert tokens <= max(max_batch_tokens, len(before)) or (not before and len(admitted) == 1)
        if not scheduler.running:
            break
        index = data.draw(st.integers(0, len(scheduler.running) - 1))
        scheduler.remove(scheduler.running[index])
    assert order == requests
    assert not scheduler.running
    assert not scheduler.waiting


def test_as_many_join_as_fit_at_once() -> None:
    scheduler = Scheduler(max_sequences=10, max_batch_tokens=9)
    requests = [request(n) for n in (3, 4, 2, 1)]
    for one in requests:
        scheduler.add(one)
    assert scheduler.admit() == requests[:3]
    scheduler.remove(requests[0])
    assert scheduler.admit() == requests[3:]  # 2 running tokens and 1 of its prompt
    scheduler.add(request(7))  # with the tokens of the 3 that run, one too many
    assert scheduler.admit() == []
    scheduler.remove(requests[3])
    assert len(scheduler.admit()) == 1


def test_a_request_can_be_removed_while_it_waits() -> None:
    scheduler = Scheduler(max_sequences=1, max_batch_tokens=9)
    first, second, third = request(2), request(2), request(2)
    for one in (first, second, third):
        scheduler.add(one)
    scheduler.admit()
    scheduler.remove(second)
    scheduler.remove(second)
    scheduler.remove(first)
    assert scheduler.admit() == [third]
