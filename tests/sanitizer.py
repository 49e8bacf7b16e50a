"""PyTorch's CUDA stream sanitizer, run on schedules that are not captured as CUDA graphs.

    python -m tests.sanitizer --models googlenet towers8 --kernels eager --removed 20

It observes ops in the dispatcher, and events as they are recorded and waited for, and reports two accesses to one
address without an order. So it sees ATen ops, but not the accesses of Triton kernels, nor replays of CUDA graphs. As it
identifies tensors by the address of their first element, it misses overlapping accesses that start at different
addresses. Without a GPU (``--device cpu``), streams are only numbers that are reported to the same sanitizer.

Its callbacks stay registered for the life of the process, so it runs in a process of its own.
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

_VIEWS = {
    *(torch.ops.aten._unsafe_view.default, torch.ops.aten.set_.source_Storage_storage_offset),
    torch.ops.inductor._reinterpret_tensor.default,
}
"""Views whose schemas do not say so: they launch no kernel, and read and write nothing."""


class Sanitizer(csan.CUDASanitizerDispatchMode):
    """PyTorch's sanitizer, without accesses of views and of tensors without memory."""

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
        """Wait for all work so far."""
        torch.cuda.synchronize()


class EmulatedSanitizer(TorchDispatchMode):
    """The same for emulated streams, which are only numbers, and tensors on the CPU.

    The sanitizer does not see memory on the CPU being reused, so none is freed until all work is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.event_handler = csan.EventHandler()
        self.stream = 0
        self._outputs: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and look at what it reads and writes."""
        accesses = _Accesses("cpu")
        outputs = accesses.run(func, args, kwargs or {})
        self._outputs.append(outputs)
        accesses.report(self.event_handler, self.stream, func)
        return outputs

    def run(self, planned: Planned, lowered: fx.GraphModule, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Run a lowered graph in the order of the host."""
        outputs: Sequence[Tensor | None] = _EmulatedStreams(lowered, self).run(*tensors, enable_io_processing=False)
        return outputs

    def settle(self) -> None:
        """Wait for all work so far; its memory may be reused from here on."""
        self.event_handler._handle_device_synchronization()
        self._outputs.clear()
        self.stream = 0


class _Accesses(csan.ArgumentHandler):
    """The accesses of an op to tensors on one kind of device.

    Tensors without memory, like an empty mask of dropout, are left out: PyTorch's handler identifies them by the
    addresses of their Python objects, which are reused.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op and record its accesses."""
        if func in _VIEWS or func is torch.ops.aten.record_stream.default:
            return func(*args, **kwargs)
        creates = bool(csan.FACTORY_FUNCTION_REGEX.match(func._schema.name))
        self.parse_inputs(func._schema, args, kwargs, is_factory=creates)
        outputs = func(*args, **kwargs)
        self.parse_outputs(func._schema, outputs, is_factory=creates)
        return outputs

    def report(self, handler: csan.EventHandler, stream: int, func: Any) -> None:
        """Report them as a launch on a stream; raises if they race with others."""
        written, read = self.dataptrs_written, self.dataptrs_read - self.dataptrs_written
        named = (self.outputs, func._schema, self.tensor_aliases)
        if self.tensor_aliases and (errors := handler._handle_kernel_launch(stream, read, written, *named)):
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


class _EmulatedStreams(fx.Interpreter):
    """Reports streams and events to a sanitizer."""

    def __init__(self, lowered: fx.GraphModule, sanitizer: EmulatedSanitizer) -> None:
        super().__init__(lowered)
        self._sanitizer, self._events = sanitizer, 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        syncs = self._sanitizer.event_handler
        if target in (streams.fork, streams.release):
            return None
        if target is streams.use:
            self._sanitizer.stream = args[1]
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
    """The first race that the sanitizer reports in a run of a schedule, or ``""``.

    The caller's stream writes the inputs right before and reads the outputs right after, so waits for fork and join are
    checked like others.
    """
    lowered, arguments = planned.lowered(schedule), planned.arguments[0]
    roles = [placeholder.role for placeholder in planned.program.placeholders]
    sanitizer.settle()
    try:
        with sanitizer, without_autocast(planned.program.level):
            tensors = [t.clone() if role is Role.INPUT else t for t, role in zip(arguments, roles, strict=True)]
            copied(sanitizer.run(planned, lowered, tensors))
    except csan.CUDASanitizerErrors as found:
        return " ".join(str(found.errors[0]).split())[:200]
    finally:
        sanitizer.settle()
    return ""


def without_some_waits(schedule: Schedule, most: int) -> Iterator[Schedule]:
    """At most so many schedules that lack one wait each, spread evenly over the schedule."""
    changed = list(without_a_wait(schedule))
    yield from changed[:: max(1, -(-len(changed) // most))] if most else ()


def checked(sanitizer: AnySanitizer, planned: Planned, schedule: Schedule, most: int) -> dict[str, Any]:
    """The finding for a schedule, and for how many schedules that lack a wait there is one."""
    before = sanitizer.event_handler.seq_num
    found = finding(sanitizer, planned, schedule)
    seen = sanitizer.event_handler.seq_num - before
    removed = [bool(finding(sanitizer, planned, broken)) for broken in without_some_waits(schedule, most)]
    shape = {"streams": schedule.streams, "ops": len(schedule.launches), "waits": schedule.wait_count}
    return {**shape, "launches_seen": seen, "removed": len(removed), "reported": sum(removed), "finding": found}


def main(argv: Sequence[str] | None = None) -> int:
    """Sanitize models, one line of JSON for each schedule; fails on a finding, or if a removed wait is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer", description=main.__doc__)
    parser.add_argument("--device", default="cuda", help="where to run (default: cuda)")
    parser.add_argument("--models", nargs="*", default=list(INFERENCE), choices=INFERENCE, help="default: all")
    parser.add_argument("--kernels", nargs="*", default=list(LEVELS), choices=LEVELS, help="what one op is")
    parser.add_argument("--policies", nargs="*", default=["critical_path"], choices=STREAMED, help="how to schedule")
    parser.add_argument("--streams", nargs="*", type=int, default=[3, 4], help="over how many (default: 3 4)")
    parser.add_argument("--removed", type=int, default=0, help="waits of each schedule to remove in turn (default: 0)")
    options = parser.parse_args(argv)
    device, failed = torch.device(options.device), False
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    sanitizer = EmulatedSanitizer() if device.type == "cpu" else Sanitizer()
    for name in options.models:
        subject = prepare(INFERENCE[name], 1, device, dtype)
        for level in options.kernels:
            model = planned(subject.model, [subject.args], level)
            _warm(model)
            for policy in options.policies:
                for count in options.streams:
                    schedule = model.schedule(policy, count, captured=False)
                    result = checked(sanitizer, model, schedule, options.removed)
                    line = {"model": name, "kernels": level, "policy": policy, **result}
                    unreported = result["removed"] > 0 == result["reported"]
                    blind = level == "eager" and (unreported or not result["launches_seen"])
                    failed = failed or bool(result["finding"]) or blind
                    print(json.dumps(line), flush=True)
    return int(failed)


@torch.no_grad()
def _warm(planned: Planned) -> None:
    """Run once: libraries choose algorithms in a first run, with more accesses."""
    planned.run(planned.lowered(planned.schedule("sequential", 1, captured=False)), 1)(*planned.arguments[0])


if __name__ == "__main__":
    sys.exit(main())
