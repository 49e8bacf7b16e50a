"""``prefetch``: batches, order, memory and errors are the loader's, however a loop ends."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import time
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import autostream
from autostream.api import OptimizedModule
from autostream.errors import OptionError, TargetError
from autostream.runtime import streams
from autostream.runtime.input_buffers import BufferTable
from autostream.training import TrainStep
from tests.make_believe import GPU, Device
from tests.threads import in_threads


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with Device.installed(monkeypatch) as device:
        yield device


def read(device: Device, batch: Tensor, seen: list[float]) -> None:
    """A kernel on the current stream that reads a batch."""
    memory = device.alias(batch)
    device.launch(lambda: seen.append(memory.mean().item()))


class Loader:
    """Batches 0, 1, …; remembers which were asked for, and some raise."""

    def __init__(self, count: int = 5, fails: frozenset[int] = frozenset()) -> None:
        self.count, self.fails = count, fails
        self.asked: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        return Batches(self)


class Batches(Iterator[Tensor]):
    """Continues after a batch that raises, as a DataLoader does."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.next = loader, 0

    def __next__(self) -> Tensor:
        number, self.next = self.next, self.next + 1
        self.loader.asked.append(number)
        if number in self.loader.fails:
            raise ValueError(f"batch {number} is damaged")
        if number >= self.loader.count:
            raise StopIteration
        return torch.full((4,), float(number))


def consume(device: Device, batches: Iterable[Tensor]) -> list[float]:
    """A loop of kernels that read one batch each; the list fills when the device runs."""
    seen: list[float] = []
    for batch in batches:
        read(device, batch, seen)
    return seen


FAST = autostream.optimize(model := nn.Linear(4, 4))
STEP = autostream.train_step(model, torch.optim.SGD(model.parameters()), nn.MSELoss())


@pytest.mark.parametrize("order", range(2))
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("into", [None, FAST], ids=["anywhere", "in input buffers"])
def test_all_batches_come_in_order_in_bounded_memory(
    device: Device, into: OptimizedModule | None, depth: int, order: int
) -> None:
    loader = Loader(9)
    ahead = autostream.prefetch(loader, "cuda", depth, into=into)
    seen = consume(device, ahead)
    device.run(order)
    assert seen == list(map(float, range(9)))
    assert device.blocks == depth + 1, "those read ahead, and the one that the loop holds"
    again = consume(device, ahead)
    device.run(order)
    assert again == seen
    assert device.blocks == depth + 1


@settings(max_examples=50)
@given(
    depth=st.integers(1, 3),
    into=st.booleans(),
    actions=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=8),
    order=st.integers(0, 9),
)
def test_each_batch_is_read_correctly_however_it_is_consumed(
    depth: int, into: bool, actions: list[tuple[int, bool, bool, bool]], order: int
) -> None:
    """On any of three streams, kept or dropped, with other memory allocated and written, and iterated again."""
    with pytest.MonkeyPatch.context() as patch, Device.installed(patch) as device:
        ahead = autostream.prefetch(Loader(99), "cuda", depth, into=FAST if into else None)
        others, kept, seen, expected = [device.stream(), device.stream()], list[Tensor](), list[float](), list[float]()
        batches = iter(ahead)
        number = 0.0
        for which, keeps, writes, anew in actions:
            with device.using([device.current, *others][which]):
                if anew:
                    batches, number = iter(ahead), 0.0
                batch = next(batches)
                read(device, batch, seen)
                expected.append(number)
                if keeps:
                    kept.append(batch)
                del batch
                if writes:
                    mine = device.empty_like(torch.full((4,), -1.0))
                    device.copy(mine, torch.full((4,), -1.0))
                    del mine
                number += 1.0
        del batches
        device.run(order)
        assert sorted(seen) == sorted(expected)


def input_buffers_of(fast: Any) -> BufferTable:
    return fast.input_buffers if isinstance(fast, TrainStep) else fast._autostream.input_buffers  # type: ignore[no-any-return]


def lying(fast: Any, batches: Iterable[Tensor]) -> list[int]:
    """The input buffer of each batch, as a number; -1 for other memory."""
    addresses, buffers = [], input_buffers_of(fast)
    for batch in batches:  # which holds one while the next is asked for
        addresses.append(batch.data_ptr())
    order = list(dict.fromkeys(address for address in addresses if address in buffers))
    return [order.index(address) if address in buffers else -1 for address in addresses]


@pytest.mark.parametrize("fast", [FAST, STEP], ids=["model", "step"])
@pytest.mark.parametrize("depth", [1, 3])
def test_batches_for_a_graph_come_in_as_many_input_buffers_as_needed(device: Device, depth: int, fast: Any) -> None:
    """The same ones in each epoch, until the iterable and its iterators are gone."""
    ahead = autostream.prefetch(Loader(9), "cuda", depth, into=fast)
    places = [lying(fast, ahead) for _ in range(2)]
    assert set(places[0]) == set(places[1]) == set(range(depth + 1))
    assert len(input_buffers_of(fast)) == depth + 1
    batches = iter(ahead)
    next(batches)
    del ahead
    assert len(input_buffers_of(fast)) == depth + 1, "an iterator is left"
    del batches
    assert len(input_buffers_of(fast)) == 0


def test_only_batches_like_the_first_come_in_input_buffers(device: Device) -> None:
    """The last is smaller; one has a tensor more."""
    x = torch.ones(4)
    batches: list[tuple[Any, ...]] = [(x,), (x, "named"), (x, x), (x[:2],)]
    ahead = autostream.prefetch(batches, "cuda", into=FAST)
    assert [place >= 0 for place in lying(FAST, (batch[0] for batch in ahead))] == [True, True, False, False]


class Anew:
    """Its own iterator; ``iter`` starts it again, or does not."""

    def __init__(self, anew: bool) -> None:
        self.anew, self.number, self.begun = anew, 0, 0

    def __iter__(self) -> Anew:
        self.begun += 1
        self.number = 0 if self.anew else self.number
        return self

    def __next__(self) -> Tensor:
        if self.number == 4:
            raise StopIteration
        self.number += 1
        return torch.full((4,), self.number - 1.0)


@pytest.mark.parametrize("anew", [True, False])
def test_a_loader_that_is_its_own_iterator_and_may_start_again_is_not_read_ahead(
    device: Device, anew: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two loops that break, then one to the end; each calls ``iter`` once."""
    loader, seen = Anew(anew), list[float]()
    ahead = autostream.prefetch(loader, "cuda", depth=3)
    for epoch, end in enumerate((2, 1, None), 1):
        for batch in itertools.islice(ahead, end):
            read(device, batch, seen)
        assert loader.begun == epoch
    device.run(0)
    assert seen == ([0, 1, 0, 0, 1, 2, 3] if anew else [0, 1, 2, 3])
    (told,) = caplog.messages
    assert told.startswith(
        "autostream: prefetch: Anew is its own iterator, and Anew.__iter__ may begin anew, so no batch is read"
    )


class Returned:
    """Its ``__iter__`` is like that of ``Iterator``."""

    def __init__(self) -> None:
        self.batches = Batches(Loader(6))

    def __iter__(self) -> Returned:
        return self

    def __next__(self) -> Tensor:
        return next(self.batches)


@pytest.mark.parametrize(
    "make",
    [
        Returned,
        lambda: Batches(Loader(6)),
        lambda: (batch for batch in Loader(6)),
        lambda: iter(list(Loader(6))),
        lambda: map(torch.clone, Loader(6)),
        lambda: itertools.islice(Loader(9), 6),
        lambda: iter(DataLoader(range(6), batch_size=None, collate_fn=lambda n: torch.full((4,), float(n)))),  # type: ignore[arg-type]
    ],
    ids=["by hand", "inherited", "generator", "list", "map", "islice", "DataLoader"],
)
def test_a_loader_that_is_its_own_iterator_is_continued(
    device: Device, make: Callable[[], Iterator[Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    loader = make()
    ahead, seen = autostream.prefetch(loader, "cuda", depth=3), list[float]()
    for batch in itertools.islice(ahead, 2):
        read(device, batch, seen)
    device.run(0)
    assert seen == [0, 1]
    assert next(loader).mean() == 4, "2 and 3 were read ahead"
    rest = consume(device, ahead)
    device.run(0)
    assert rest == [2, 3, 5]
    assert not caplog.messages


def test_exceptions_come_in_order_and_nothing_is_read_beyond_them(device: Device) -> None:
    """The loader continues after them; a generator would be at its end."""
    loader = Loader(5)
    batches = iter(autostream.prefetch(loader, GPU, depth=3))
    assert loader.asked == []
    for asked in ([0, 1, 2], [0, 1, 2, 3]):
        next(batches)
        assert loader.asked == asked, "no more than depth"
    loader = Loader(5, fails=frozenset({1, 2}))
    batches = iter(autostream.prefetch(loader, "cuda", depth=4))
    next(batches)
    assert loader.asked == [0, 1], "nothing is read beyond"
    for number in (1, 2):
        with pytest.raises(ValueError, match=f"batch {number} is damaged"):
            next(batches)
    assert len(list(batches)) == 2
    assert list(batches) == []


def test_a_loop_that_breaks_frees_everything(device: Device) -> None:
    """The loader's iterator, which may have workers, is freed at once, without the garbage collector."""
    gc.disable()
    try:
        loader, seen = Loader(), list[float]()
        for end in (1, 2, 5, 6):
            iterator = iter(autostream.prefetch(loader, "cuda"))
            theirs = weakref.ref(iterator._batches)  # type: ignore[attr-defined]
            for number, batch in enumerate(iterator, 1):
                read(device, batch, seen)
                if number == end:
                    break
            del iterator, batch
            assert theirs() is None
        assert device.blocks == 3
    finally:
        gc.enable()
    device.run(1)
    assert seen == [0, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_a_queued_exception_has_a_note_and_keeps_nothing_alive(device: Device) -> None:
    def batches() -> Iterator[Tensor]:
        yield torch.zeros(4)
        try:
            raise KeyError("lost")
        except KeyError as error:
            raise ValueError("damaged") from error

    gc.disable()
    try:
        iterator = iter(autostream.prefetch(batches(), "cuda"))
        theirs = weakref.ref(iterator._batches)  # type: ignore[attr-defined]
        next(iterator)
        del iterator
        assert theirs() is None
    finally:
        gc.enable()
    ahead = iter(autostream.prefetch(batches(), "cuda"))
    next(ahead)
    with pytest.raises(ValueError, match="damaged") as raised:
        next(ahead)
    (note,) = raised.value.__notes__
    assert "KeyError: 'lost'" in note
    assert 'raise ValueError("damaged") from error' in note


def test_a_queued_exception_keeps_its_causes(device: Device) -> None:
    """Its cause, the context of that, and members of a group; not what the consumer handled."""

    def batches() -> Iterator[Tensor]:
        yield torch.zeros(4)
        try:
            try:
                raise OSError("disk")
            except OSError:
                raise KeyError("lost")  # noqa: B904
        except KeyError as error:
            raise ExceptionGroup("damaged", [failed("one"), failed("two")]) from error

    def failed(name: str) -> Exception:
        try:
            raise ValueError(name)
        except ValueError as error:
            return error

    ahead, outside = iter(autostream.prefetch(batches(), "cuda")), RuntimeError("outside")
    try:
        raise outside
    except RuntimeError:
        next(ahead)
    assert outside.__traceback__ is not None, "it is the consumer's"
    try:
        raise LookupError("where it is asked for")
    except LookupError:
        with pytest.raises(ExceptionGroup) as raised:
            next(ahead)
    lost = raised.value.__cause__
    assert isinstance(lost, KeyError)
    assert raised.value.__context__ is lost
    disk = lost.__context__
    assert isinstance(disk, OSError)
    assert disk.__context__ is None
    frames = [each.__traceback__ for each in (lost, disk, *raised.value.exceptions)]
    assert frames == [None] * 4, "they hold the iteration"
    ahead, handled = iter(autostream.prefetch(Loader(1, fails=frozenset({0})), "cuda")), LookupError("handled")
    try:
        raise handled
    except LookupError:
        with pytest.raises(ValueError, match="damaged") as without_context:
            next(ahead)
    assert without_context.value.__context__ is handled


def test_an_exception_that_is_raised_again_has_one_note(device: Device) -> None:
    error = ValueError("again")
    error.add_note("theirs")

    class Broken(Iterator[Tensor]):
        def __next__(self) -> Tensor:
            raise error

    ahead = iter(autostream.prefetch(Broken(), "cuda"))
    for _ in range(3):
        with pytest.raises(ValueError, match="again"):
            next(ahead)
    theirs, ours = error.__notes__
    assert theirs == "theirs"
    assert ours.startswith("Raised while prefetch read ahead:")


def test_threads_share_an_iteration_and_each_reads_on_its_own_stream(device: Device) -> None:
    """A generator raises where two threads are in it at once."""

    def numbers() -> Iterator[Tensor]:
        for number in range(40):
            time.sleep(0.0005)  # lets other threads run
            yield torch.full((4,), float(number))

    batches = iter(autostream.prefetch(numbers(), "cuda"))
    seen: list[float] = []

    def work(_: int) -> None:
        with device.active(), device.using(device.stream()):
            for batch in batches:
                read(device, batch, seen)

    in_threads(3, work)
    device.run(2)
    assert sorted(seen) == list(map(float, range(40)))


def test_a_batch_without_memory_comes_later(device: Device) -> None:
    device.bytes_left = 2 * 16
    batches = iter(autostream.prefetch(Loader(4), "cuda", depth=3))
    seen = []
    for _ in range(4):
        batch = next(batches)
        device.run(0)
        seen.append(batch.mean().item())
        del batch
    assert seen == [0.0, 1.0, 2.0, 3.0]


def test_a_batch_without_memory_is_not_lost(device: Device) -> None:
    device.bytes_left = 0
    batches = iter(autostream.prefetch(Loader(3), "cuda"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            next(batches)
    device.bytes_left = 1000
    found = list(batches)
    device.run(0)
    assert [batch.mean().item() for batch in found] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("order", range(4))
def test_a_batch_that_waited_for_memory_may_be_taken_on_another_stream(device: Device, order: int) -> None:
    """The loader makes its batches on the device, on the stream that reads ahead; another one takes them."""
    seen: list[float] = []
    other = device.stream()

    def made() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(2):
            value = torch.full((4,), float(number))
            there = device.empty_like(value)
            device.copy(there, value)
            yield there, value

    batches = iter(autostream.prefetch(made(), "cuda", depth=1))
    device.bytes_left = 16
    with pytest.raises(torch.OutOfMemoryError):
        next(batches)
    device.bytes_left = 1000
    for _ in range(2):
        with device.using(other):
            there, memory = (device.alias(tensor) for tensor in next(batches))
            device.launch(lambda ours=(there, memory): seen.extend(each.mean().item() for each in ours))
            del there, memory
    device.run(order)
    assert seen == [0.0, 0.0, 1.0, 1.0]


class Named(NamedTuple):
    x: Tensor
    path: str


@dataclass
class Sample:
    x: Tensor
    mask: Tensor | None
    scale: float = 2.0


class Odd:
    """An unknown type."""


def test_batches_may_be_nested_containers_of_any_values(device: Device) -> None:
    x, odd, array = torch.ones(2), Odd(), np.ones(2)
    there = device.empty_like(x)
    given: dict[Any, Any] = {
        "named": Named(x, "a.png"),
        "sample": Sample(x, None),
        "tokens": UserDict({"ids": x}),
        "others": [odd, array, 3, None, "text"],
        "there": there,
        np.int64(3): x,
        "packed": pack_sequence([torch.ones(2), torch.ones(1)]),
    }
    (batch,) = autostream.prefetch([given], "cuda")
    for moved in (batch["named"].x, batch["sample"].x, batch["tokens"]["ids"], batch["packed"].data, batch[3]):
        assert device.holds(moved)
    assert not device.holds(batch["packed"].batch_sizes), "the host's"
    assert batch["there"] is there
    assert batch["others"][0] is odd
    assert batch["others"][1] is array
    assert batch["others"][2:] == [3, None, "text"]
    assert (type(batch["named"]), type(batch["sample"]), type(batch["tokens"])) == (Named, Sample, UserDict)
    assert (batch["named"].path, batch["sample"].scale, batch["sample"].mask) == ("a.png", 2.0, None)


def test_containers_that_the_loader_reuses_are_copied(device: Device) -> None:
    def batches() -> Iterator[dict[str, Any]]:
        batch: dict[str, Any] = {}
        for number in range(3):
            batch |= {"x": torch.full((4,), float(number)), "number": number}
            yield batch

    assert [batch["number"] for batch in autostream.prefetch(batches(), "cuda")] == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_may_have_workers(device: Device, workers: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(10.0), torch.arange(10)), batch_size=4, num_workers=workers)
    ahead = autostream.prefetch(loader, "cuda")
    assert len(ahead) == len(loader)  # type: ignore[arg-type]
    kept = [x for x, _ in ahead]
    device.run(0)
    assert torch.cat(kept).tolist() == list(map(float, range(10)))


def test_attributes_length_and_truth_are_the_loaders(device: Device) -> None:
    loader = DataLoader([torch.ones(2)] * 3, batch_size=2)  # type: ignore[arg-type]
    batches: Any = autostream.prefetch(loader, "cuda")
    assert batches.dataset is loader.dataset
    assert copy.copy(batches).batch_size == 2
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = batches.no_such_thing
    both = [autostream.prefetch([torch.ones(2)], "cuda") for _ in range(2)]
    assert both[0] != both[1]
    assert "tensor" not in repr(both[0])
    counted = Loader(4)
    ahead: Any = autostream.prefetch(counted, "cuda")
    ahead.count = 2
    assert counted.count == 2
    assert len(list(ahead)) == 2
    copy.copy(ahead).count = 3
    assert counted.count == 3
    for name in ("loader", "depth"):
        with pytest.raises(AttributeError, match=f"{name} of what prefetch returned stays as it is"):
            setattr(ahead, name, 3)
    generator: Any = autostream.prefetch((torch.zeros(1) for _ in range(2)), "cuda")
    with pytest.raises(TypeError):
        len(generator)
    assert generator
    assert not autostream.prefetch([], "cuda")


def test_batches_read_ahead_in_inference_mode_are_no_inference_tensors(device: Device) -> None:
    batches = iter(autostream.prefetch(Loader(), "cuda"))
    with torch.inference_mode():
        next(batches)
    assert not next(batches).is_inference()


def test_on_the_cpu_the_loader_itself_is_used(caplog: pytest.LogCaptureFixture) -> None:
    loader = Loader()
    assert autostream.prefetch(loader, "cpu") is loader
    assert not caplog.records
    if not torch.cuda.is_available():
        with caplog.at_level(logging.WARNING, "autostream"):
            assert autostream.prefetch(loader, "cuda") is autostream.prefetch(loader, 0) is loader
        assert caplog.text.count("no CUDA device") == 2


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        *((([], "cpu", depth), OptionError, "whole number from 1") for depth in (0, True, 1.5, "2")),
        *(
            (([], name), OptionError, 'is not allowed: use "cuda", "cuda:0" or "cpu"$')
            for name in (None, "banana", -1, 1.5)
        ),
        ((3, "cpu"), TargetError, "iterable of batches, not 3"),
        (([], "meta"), TargetError, "not to meta"),
        (([], "cuda:99"), TargetError, r"no cuda:99 here: use cuda:0 to cuda:0$"),
        (([], "cuda", 2, nn.ReLU()), TargetError, r"^into takes what optimize, train_step or step returned, not "),
    ],
)
def test_mistakes_raise(arguments: tuple[Any, ...], kind: type[Exception], message: str) -> None:
    *positional, into = arguments if len(arguments) == 4 else (*arguments, None)
    with pytest.raises(kind, match=message):
        autostream.prefetch(*positional, into=into)


# On a GPU


class Slow(IterableDataset[Tensor]):
    """Batches whose copies start late, by a kernel that spins on the copy stream."""

    def __init__(self, cycles: int) -> None:
        self.cycles = cycles

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(30):
            with torch.cuda.stream(streams.copy_stream(torch.cuda.current_device())):
                torch.cuda._sleep(self.cycles)
            yield torch.full((1 << 18,), float(number)).pin_memory()


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("copy", "work"), [(1_000_000, 0), (0, 1_000_000), (300_000, 300_000)])
def test_late_copies_and_late_work_change_nothing(copy: int, work: int, depth: int) -> None:
    seen = []
    for batch in autostream.prefetch(Slow(copy), "cuda", depth):
        torch.cuda._sleep(work)
        seen.append(batch.amin() + batch.amax())
    assert [each.item() for each in seen] == [2.0 * number for number in range(30)]


@pytest.mark.gpu
def test_loops_that_are_left_early_give_their_memory_back_safely() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        next(iter(autostream.prefetch(Slow(1_000_000), "cuda", depth=3)))
        mine = torch.full((3, 1 << 18), 7.0, device="cuda")
        assert bool((mine == 7.0).all())
        del mine
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_it_feeds_a_training_step_the_same_batches() -> None:
    def trained(prefetching: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64).cuda()
        step = autostream.train_step(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, x: model(x).square().mean(),
            kernels="eager",
        )
        batches = [torch.randn(32, 64) for _ in range(12)]
        loader = autostream.prefetch(batches, "cuda") if prefetching else (batch.cuda() for batch in batches)
        return [step(batch).item() for batch in loader]

    assert trained(True) == trained(False)
