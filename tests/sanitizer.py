"""PyTorch's stream sanitizer over schedules that run without a CUDA graph.

    python -m tests.sanitizer --models googlenet towers8 --kernels eager --removed 20

It watches ops go through the dispatcher and events as they are recorded and waited for, and reports two accesses to one
address that nothing orders. So it sees ops of ATen. It does not see what Triton kernels read and write, nor replays of
CUDA graphs; and since it knows tensors by the address of their first element, accesses to memory that overlaps but
starts elsewhere do not meet. Where there is no GPU (``--device cpu``), lanes are only numbers, and the same sanitizer
is told of them.

Its callbacks stay for the life of a process, which is therefore one of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.cuda._sanitizer as csan
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from autostream.ir import Role, Schedule
from autostream.runtime import streams
from autostream.runtime.runs import StreamRun, without_autocast
from benchmarks.zoo import INFERENCE, prepare
from tests.planned import LEVELS, STREAMED, Planned, copied, planned
from tests.scheduling.mistakes import without_a_wait

_LOOKS = {
    *(torch.ops.aten._unsafe_view.default, torch.ops.aten.set_.source_Storage_storage_offset),
    torch.ops.inductor._reinterpret_tensor.default,
}
"""Views whose schemas do not say so: no kernel is launched, and nothing is read or written."""


class Sanitizer(csan.CUDASanitizerDispatchMode):
    """PyTorch's, that knows these views, and leaves out what has no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and look at what it reads and writes."""
        accesses = _Accesses("cuda")
        outputs = accesses.run(func, args, kwargs or {})
        accesses.report(self.event_handler, torch.cuda.current_stream().cuda_stream, func)
        return outputs

    def run(self, planned: Planned, lowered: fx.GraphModule, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Run a lowered graph on real streams."""
        return StreamRun(lowered, planned.program.device)(*tensors)

    def settle(self) -> None:
        """Let all that has happened come before all that will."""
        torch.cuda.synchronize()


class EmulatedSanitizer(TorchDispatchMode):
    """The same for lanes that are only numbers, and tensors on the CPU.

    Nobody tells of memory on the CPU that is used again, so until all is settled none is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.event_handler = csan.EventHandler()
        self.lane = 0
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and look at what it reads and writes."""
        accesses = _Accesses("cpu")
        outputs = accesses.run(func, args, kwargs or {})
        self._kept.append(outputs)
        accesses.report(self.event_handler, self.lane, func)
        return outputs

    def run(self, planned: Planned, lowered: fx.GraphModule, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Run a lowered graph in the order of the host."""
        outputs: Sequence[Tensor | None] = _OnLanes(lowered, self).run(*tensors, enable_io_processing=False)
        return outputs

    def settle(self) -> None:
        """Let all that has happened come before all that will; memory may be used again from here on."""
        self.event_handler._handle_device_synchronization()
        self._kept.clear()
        self.lane = 0


class _Accesses(csan.ArgumentHandler):
    """What an op reads and writes of tensors on one kind of device.

    Tensors without memory are left out. PyTorch's tells them apart by the addresses of Python's objects, which one
    has after the other: an empty mask of dropout here, an empty reserve of a norm there.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op."""
        if func in _LOOKS or func is torch.ops.aten.record_stream.default:
            return func(*args, **kwargs)
        makes = bool(csan.FACTORY_FUNCTION_REGEX.match(func._schema.name))
        self.parse_inputs(func._schema, args, kwargs, is_factory=makes)
        outputs = func(*args, **kwargs)
        self.parse_outputs(func._schema, outputs, is_factory=makes)
        return outputs

    def report(self, handler: csan.EventHandler, lane: int, func: Any) -> None:
        """Tell of it as of a launch on a lane; raises what was found."""
        written, read = self.dataptrs_written, self.dataptrs_read - self.dataptrs_written
        named = (self.outputs, func._schema, self.tensor_aliases)
        if self.tensor_aliases and (errors := handler._handle_kernel_launch(lane, read, written, *named)):
            raise csan.CUDASanitizerErrors(errors)

    def _handle_argument(
        self, value: Any, is_write: bool, metadata_only: bool, name: str | None = None, is_output: bool = False
    ) -> None:
        if not isinstance(value, Tensor) or value.device.type != self._device or not (address := value.data_ptr()):
            return
        if is_write:
            self.dataptrs_written.add(address)
        elif not metadata_only:
            self.dataptrs_read.add(address)
        self.tensor_aliases.setdefault(address, []).extend([name] if name else [])
        if is_output:
            self.outputs.add(address)


class _OnLanes(fx.Interpreter):
    """Tells a sanitizer of lanes and events."""

    def __init__(self, lowered: fx.GraphModule, sanitizer: EmulatedSanitizer) -> None:
        super().__init__(lowered)
        self._sanitizer, self._events = sanitizer, 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        syncs = self._sanitizer.event_handler
        if target in (streams.fork, streams.release):
            return None
        if target is streams.use:
            self._sanitizer.lane = args[1]
        elif target is streams.record:
            self._events += 1
            syncs._handle_event_record(self._events, args[1])
            return self._events
        elif target is streams.wait:
            syncs._handle_event_wait(args[2], args[1])
        else:
            return super().call_function(target, args, kwargs)
        return None


AnySanitizer = Sanitizer | EmulatedSanitizer


@torch.no_grad()
def finding(sanitizer: AnySanitizer, planned: Planned, schedule: Schedule) -> str:
    """What the sanitizer says of a run of a schedule, its first line, or ``""``.

    The caller's stream writes the inputs right before, and reads the outputs right after: fork and join are looked at
    as all other waits are.
    """
    lowered, given = planned.lowered(schedule), planned.arguments[0]
    roles = [placeholder.role for placeholder in planned.program.placeholders]
    sanitizer.settle()
    try:
        with sanitizer, without_autocast(planned.program.level):
            tensors = [t.clone() if role is Role.INPUT else t for t, role in zip(given, roles, strict=True)]
            copied(sanitizer.run(planned, lowered, tensors))
    except csan.CUDASanitizerErrors as found:
        return " ".join(str(found.errors[0]).split())[:200]
    finally:
        sanitizer.settle()
    return ""


def without_some_waits(schedule: Schedule, most: int) -> Iterator[Schedule]:
    """Schedules that lack one wait each: so many, from all over the schedule."""
    changed = list(without_a_wait(schedule))
    yield from changed[:: max(1, -(-len(changed) // most))] if most else ()


def checked(sanitizer: AnySanitizer, planned: Planned, schedule: Schedule, most: int) -> dict[str, Any]:
    """What the sanitizer says of a schedule, and of how many of those that lack a wait it says something."""
    before = sanitizer.event_handler.seq_num
    said = finding(sanitizer, planned, schedule)
    seen = sanitizer.event_handler.seq_num - before
    removed = [bool(finding(sanitizer, planned, broken)) for broken in without_some_waits(schedule, most)]
    shape = {"streams": schedule.streams, "ops": len(schedule.launches), "waits": schedule.wait_count}
    return {**shape, "launches_seen": seen, "removed": len(removed), "reported": sum(removed), "finding": said}


def main(argv: Sequence[str] | None = None) -> int:
    """Sanitize models, one line of JSON for each schedule; fails on findings, and where it turns out to be blind."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer", description=main.__doc__)
    parser.add_argument("--device", default="cuda", help="where to run (default: cuda)")
    parser.add_argument("--models", nargs="*", default=list(INFERENCE), choices=INFERENCE, help="default: all")
    parser.add_argument("--kernels", nargs="*", default=list(LEVELS), choices=LEVELS, help="what one op is")
    parser.add_argument("--policies", nargs="*", default=["critical_path"], choices=STREAMED, help="how to schedule")
    parser.add_argument("--streams", nargs="*", type=int, default=[3, 4], help="over how many (default: 3 4)")
    parser.add_argument("--removed", type=int, default=0, help="waits of each schedule to remove in turn (default: 0)")
    asked = parser.parse_args(argv)
    device, failed = torch.device(asked.device), False
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    sanitizer = EmulatedSanitizer() if device.type == "cpu" else Sanitizer()
    for name in asked.models:
        subject = prepare(INFERENCE[name], 1, device, dtype)
        for level in asked.kernels:
            model = planned(subject.model, [subject.args], level)
            _warm(model)
            for policy in asked.policies:
                for count in asked.streams:
                    schedule = model.schedule(policy, count, captured=False)
                    result = checked(sanitizer, model, schedule, asked.removed)
                    known = {"model": name, "kernels": level, "policy": policy, **result}
                    unreported = result["removed"] > 0 == result["reported"]
                    blind = level == "eager" and (unreported or not result["launches_seen"])
                    failed = failed or bool(result["finding"]) or blind
                    print(json.dumps(known), flush=True)
    return int(failed)


@torch.no_grad()
def _warm(planned: Planned) -> None:
    """Libraries choose algorithms in a first run, and touch more then."""
    planned.run(planned.lowered(planned.schedule("sequential", 1, captured=False)), 1)(*planned.arguments[0])


if __name__ == "__main__":
    sys.exit(main())
