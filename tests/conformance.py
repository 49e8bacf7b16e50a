"""PyTorch's own test databases: each op and module compared with its optimized self.

    python -m tests.conformance --out conformance.json
    python -m tests.conformance --only nn.BatchNorm2d index_put --samples 0 --out some.json
    python -m tests.conformance --before conformance.json --out now.json

PyTorch tests its ops and modules with samples of inputs from two databases (``op_db`` and ``module_db``). Each sample
is called twice with ``optimize`` and twice without, the second time with other numbers of the same shapes, so that
state left over from the first call shows. Everything that a caller can see must be equal: outputs, their dtypes and
layouts, aliases, mutations, states of random number generators, gradients, and which samples raise.

Differences are printed as they are found. ``KNOWN`` has the known ones, with the reason for each. The command fails if
there is another one, or if a known one is gone. It writes all results as JSON, and a table as Markdown beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import multiprocessing
import os
import random
import shlex
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn

import autostream
from benchmarks.stamp import stamp
from tests.semantics import tensors_in

OPTIONS: Mapping[str, Any] = {"policy": "critical_path", "costs": "roofline", "streams": 2, "kernels": "eager"}
"""Options of ``optimize``: with a named policy, calls that record gradients are scheduled on a CPU too."""

SAMPLES = 3
"""Samples of each variant by default; ``KNOWN`` lists the differences that these show."""

ROUNDING = "rounding"
"""The end of a difference that is only rounding."""

OUTCOMES = ("eager's", "refused", "both raise", "different", "error")
"""Outcomes of a sample: equal with a schedule, equal but run eagerly, the same exception, different, no result."""

_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
UNINITIALIZED = frozenset((*_EMPTY, "resize_", "resize_as_"))
"""Ops that return uninitialized memory."""


class Known(NamedTuple):
    """Why a variant differs, and whether only more than the default number of samples shows it (``rare``)."""

    why: str
    rare: bool = False


_PHASE = Known(
    "its backward looks at numbers to refuse a loss that depends on the phase of eigenvectors, which is anybody's "
    "guess; PyTorch leaves that look out where it is traced"
)
_COUNT = Known(
    "a norm of order 0 counts, and its gradient is zero: eager's result requires gradients all the same, ours does not",
    rare=True,
)
_DROPOUT = Known(
    "a dropout that drops nothing returns its argument, and one that drops all draws nothing; what AOTAutograd traces "
    "copies, and draws"
)
_BOUND = Known(
    "PyTorch's fake masked_select bounds its result by its input, and forgets that it broadcasts; "
    "the schedule fails at that, and the model makes the call"
)
_RNN = Known("cuDNN has no backward of a recurrent net in eval mode; AOTAutograd makes ops of it that have one")
_GATES = Known("gradients of at most 8e-5 more or less: cuDNN adds up in another order than the ops of AOTAutograd do")
_SEED = Known("what attention says of its random numbers lies on the GPU where they are drawn for a CUDA graph")
_QUOTIENT = Known("a gradient of 5 elements, rounded in another order: 1.3e-5 apart where 1.3e-6 is allowed", rare=True)

_OVERLAP = Known("torch.compile of 2.13 has the same gradient of overlapping strides; 2.11 has eager's", rare=True)

KNOWN: Mapping[str, Mapping[str, Known]] = {
    "cpu": {
        "as_strided, in place on a copy, float32, gradients": _OVERLAP,
        "linalg.eig, function, float32, gradients": _PHASE,
        "linalg.eig, function, complex64, gradients": _PHASE,
        "linalg.eigh, function, complex64, gradients": _PHASE,
        "masked_select, function, float32, gradients": _BOUND,
        "masked_select, function, complex64, gradients": _BOUND,
        "nn.functional.dropout, function, float32, gradients": _DROPOUT,
        "norm, function, float32, gradients": _COUNT,
        "norm, function, complex64, gradients": _COUNT,
    },
    "cuda": {
        "addcdiv, function, float32, gradients": _QUOTIENT,
        "masked_select, function, float32, gradients": _BOUND,
        "masked_select, function, complex64, gradients": _BOUND,
        "nn.GRU, eval, float32, gradients": _RNN,
        "nn.GRU, train, float32, gradients": _GATES,
        "nn.LSTM, eval, float32, gradients": _RNN,
        "nn.RNN, eval, float32, gradients": _RNN,
        "nn.functional.dropout, function, float32, gradients": _DROPOUT,
        "torch.ops.aten._efficient_attention_forward, function, float32": _SEED,
        "torch.ops.aten._efficient_attention_forward, function, float32, gradients": _SEED,
    },
}
"""By device, the variants that differ."""

PICKED = (
    *("nn.BatchNorm1d", "nn.LSTM", "nn.Embedding", "nn.functional.dropout", "normal", "index_put", "masked_fill"),
    *("view", "split", "unbind", "expand", "linalg.svd", "max"),
)
"""CI checks each variant in float32 of these: state, random ops, mutation, views and several outputs."""

EVERY = 200
"""CI checks every so many variant of all others."""

_MOST = 48
"""The first samples of a variant, among which those to run are chosen: some ops have a thousand similar ones."""


@dataclass
class Call:
    """One call of an op or a module."""

    target: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    leaves: Sequence[Tensor] = ()
    """Tensors among the arguments whose gradients are compared, beside a module's parameters."""


@dataclass(frozen=True)
class Variant:
    """One way to call an op or a module."""

    name: str
    kind: str
    dtype: str
    gradients: bool
    calls: Callable[[int], Iterator[Call]]

    def __str__(self) -> str:
        return f"{self.name}, {self.kind}, {self.dtype}{', gradients' if self.gradients else ''}"


class Difference(NamedTuple):
    """Something that differs from eager's call: what, and the details."""

    what: str
    detail: str = ""


@dataclass(frozen=True)
class Seen:
    """What a caller can see of a call."""

    result: Any
    inputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    generators: Mapping[str, Any]
    error: Exception | None = None


@dataclass
class Findings:
    """The results of the samples of one variant."""

    outcomes: dict[int, str] = field(default_factory=dict)
    differences: dict[int, list[Difference]] = field(default_factory=dict)
    rounded: list[int] = field(default_factory=list)
    """Samples that differ by rounding only, which is no difference."""
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, index: int, outcome: str, *reasons: str) -> None:
        self.outcomes[index] = outcome
        self.reasons += [reason for reason in dict.fromkeys(reasons) if reason not in self.reasons]


class OutOfTime(BaseException):
    """A variant takes too long. It is no ``Exception``, as ``optimize`` and the samples catch those."""


# Variants and their samples


def variants_of(device: str, gradients: bool) -> list[Variant]:
    """All variants in both databases that a device supports, in their order."""
    return [*_module_variants(device, gradients), *_op_variants(device, gradients)]


def _module_variants(device: str, gradients: bool) -> Iterator[Variant]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for mode, recorded in itertools.product(("train", "eval"), (False, True) if gradients else (False,)):
            calls = partial(_module_calls, info, device, mode == "train", recorded)
            yield Variant(info.name, mode, "float32", recorded, calls)
        if info.module_error_inputs_func is not None:
            yield Variant(info.name, "errors of modules", "float32", False, partial(_module_errors, info, device))


def _module_calls(info: Any, device: str, training: bool, gradients: bool, seed: int) -> Iterator[Call]:
    _seed(seed)
    samples = info.module_inputs_func(
        info, device=device, dtype=torch.float32, requires_grad=gradients, training=training
    )
    for sample in samples:
        if sample.forward_input is not None:
            yield _module_call(info, sample, device, training)


def _module_errors(info: Any, device: str, seed: int) -> Iterator[Call]:
    from torch.testing._internal.common_modules import ModuleErrorEnum

    _seed(seed)
    samples = info.module_error_inputs_func(
        info, device=device, dtype=torch.float32, requires_grad=False, training=True
    )
    for sample in samples:
        if sample.error_on is ModuleErrorEnum.FORWARD_ERROR:
            yield _module_call(info, sample.module_error_input, device, training=True)


def _module_call(info: Any, sample: Any, device: str, training: bool) -> Call:
    made, given = sample.constructor_input, sample.forward_input
    module = info.module_cls(*made.args, **made.kwargs).to(device).to(torch.float32).train(training)
    return Call(module, given.args, given.kwargs, _leaves(tensors_in((given.args, given.kwargs))))


_LAYOUTS = {"sparse COO": torch.sparse_coo, "sparse CSR": torch.sparse_csr}


def _op_variants(device: str, gradients: bool) -> Iterator[Variant]:
    from torch.testing._internal import common_methods_invocations, common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core
    from torch.testing._internal.opinfo.definitions import sparse  # noqa: F401 - samples of sparse inputs

    # Random ops in the database seed the generator and restore its state, which would hide what they do to it.
    common_methods_invocations.wrapper_set_seed = _unseeded
    # Each iterator of samples looks through the stack for the unittest that runs it: there is none, but it takes long.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    for op in op_db:
        supported = op.supported_dtypes(device)
        wanted = (torch.float32, torch.complex64, torch.int64, torch.complex32)
        dtypes = [dtype for dtype in wanted if dtype in supported] or sorted(supported, key=str)[:1]
        name = f"{op.name} ({op.variant_test_name})" if op.variant_test_name else op.name
        differentiable = op.supported_backward_dtypes(device) if gradients and op.supports_autograd else ()
        for dtype in dtypes:
            kind = str(dtype).removeprefix("torch.")
            for recorded in (False, True) if dtype in differentiable and dtype is not torch.complex32 else (False,):
                made = partial(_op_samples, op, device, dtype, recorded)
                yield Variant(name, "function", kind, recorded, partial(_op_calls, op, made))
                if op.inplace_variant is not None and dtype not in (torch.int64, torch.complex32):
                    yield Variant(name, "in place", kind, recorded, partial(_in_place_calls, op, made, False))
                    if recorded and dtype is torch.float32:
                        yield Variant(name, "in place on a copy", kind, True, partial(_in_place_calls, op, made, True))
            made = partial(_op_samples, op, device, dtype, False)
            if op.supports_out and dtype is dtypes[0]:
                yield Variant(name, "out", kind, False, partial(_out_calls, op, made))
        for layout, kind in _LAYOUTS.items():
            if torch.float32 in supported and op.supports_sparse_layout(kind):
                made = partial(_sparse_samples, op, device, kind)
                yield Variant(name, layout, "float32", False, partial(_op_calls, op, made))
        if op.error_inputs_func is not None:
            yield Variant(name, "errors", "any", False, partial(_op_calls, op, partial(_error_samples, op, device)))


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _op_samples(op: Any, device: str, dtype: torch.dtype, gradients: bool) -> Iterator[Any]:
    return op.sample_inputs(device, dtype, requires_grad=gradients, set_seed=False)


def _sparse_samples(op: Any, device: str, layout: torch.layout) -> Iterator[Any]:
    return op.sample_inputs_sparse(layout, device, torch.float32, requires_grad=False)


def _error_samples(op: Any, device: str) -> Iterator[Any]:
    return (error.sample_input for error in op.error_inputs(device, set_seed=False))


def _op_calls(op: Any, samples: Callable[[], Iterator[Any]], seed: int) -> Iterator[Call]:
    _seed(seed)
    for sample in samples():
        tensors = tensors_in((sample.input, sample.args, sample.kwargs))
        yield Call(op.op, (sample.input, *sample.args), sample.kwargs, _leaves(tensors))


def _in_place_calls(op: Any, samples: Callable[[], Iterator[Any]], inside: bool, seed: int) -> Iterator[Call]:
    """Writes to a copy of the sample's input, which is a leaf; the copy is made inside of what is optimized, or not."""

    def on_a_copy(written: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op.inplace_variant(written.clone(), *args, **kwargs)

    _seed(seed)
    for sample in samples():
        if not sample.broadcasts_input and isinstance(sample.input, Tensor):
            leaves = _leaves(tensors_in((sample.input, sample.args, sample.kwargs)))
            target, written = (on_a_copy, sample.input) if inside else (op.inplace_variant, sample.input.clone())
            yield Call(target, (written, *sample.args), sample.kwargs, leaves)


def _out_calls(op: Any, samples: Callable[[], Iterator[Any]], seed: int) -> Iterator[Call]:
    """Writes to tensors of ones with the shapes of the results."""
    _seed(seed)
    for sample in samples():
        args = (sample.input, *sample.args)
        with torch.no_grad():
            result = op.op(*args, **sample.kwargs)
        out = torch.ones_like(result) if isinstance(result, Tensor) else tuple(map(torch.ones_like, result))
        yield Call(op.op, args, {**sample.kwargs, "out": out})


def _leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


# What a caller can see


def observe(run: Callable[..., Any], call: Call, gradients: bool, seed: int = 7) -> Seen:
    """Run a call, and collect everything that it returns and changes."""
    _seed(seed)
    result, error = None, None
    with torch.set_grad_enabled(gradients):
        try:
            result = run(*call.args, **call.kwargs)
            if gradients:
                _backward(result)
        except Exception as raised:
            error = raised
    module = call.target if isinstance(call.target, nn.Module) else nn.Module()
    inputs = [*tensors_in((call.args, call.kwargs)), *tensors_in(dict(module.state_dict(keep_vars=True)))]
    leaves = [*call.leaves, *(parameter for parameter in module.parameters() if not nn.parameter.is_lazy(parameter))]
    generators = {"torch's": torch.get_rng_state(), "Python's": random.getstate()}
    if torch.cuda.is_initialized():
        generators["CUDA's"] = torch.cuda.get_rng_state()
    return Seen(result, inputs, [leaf.grad for leaf in leaves], generators, error)


def _backward(result: Any) -> None:
    """Run the backward of all results at once, each with a gradient of its own."""
    outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    generator = torch.Generator().manual_seed(0)
    output_gradients = [_output_gradient(tensor, generator) for tensor in outputs]
    if outputs:
        torch.autograd.backward(outputs, output_gradients)


def _output_gradient(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.layout is not torch.strided:
        return torch.ones_like(tensor)
    return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator).to(tensor.device)


def differences(ours: Seen, theirs: Seen, numbers: bool = True) -> Iterator[Difference]:
    if ours.error or theirs.error:
        if not (ours.error and theirs.error and isinstance(ours.error, type(theirs.error))):
            yield Difference(f"{_told(ours.error)}, eager {_told(theirs.error)}", str(ours.error or theirs.error)[:200])
        return
    yield from _apart(ours.result, theirs.result, "output", numbers)
    for at, (one, other) in enumerate(zip(ours.inputs, theirs.inputs, strict=True)):
        yield from _apart(one, other, f"input {at} afterwards", numbers)
    for at, (one, other) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        yield from _apart(one, other, f"gradient {at}", numbers)
    relations = zip(_relations(ours), _relations(theirs), strict=False)  # their number was compared above
    for at, (one, other) in enumerate(relations):
        if one != other:
            yield Difference(f"output {at} is {one}, eager's is {other}")
    for name, state in theirs.generators.items():
        our_state = ours.generators[name]
        if not (torch.equal(our_state, state) if isinstance(state, Tensor) else our_state == state):
            yield Difference(f"{name} random state")


def _told(error: Exception | None) -> str:
    return f"raises {type(error).__name__}" if error else "returns"


def _apart(ours: Any, theirs: Any, where: str, numbers: bool) -> Iterator[Difference]:
    if type(ours) is not type(theirs):
        yield Difference(f"{where} is a {type(ours).__name__}, eager's a {type(theirs).__name__}")
    elif isinstance(theirs, Tensor):
        yield from _tensors_apart(ours, theirs, where, numbers)
    elif isinstance(theirs, Mapping):
        yield from _apart(list(ours.items()), list(theirs.items()), where, numbers)
    elif dataclasses.is_dataclass(theirs):
        names = [each.name for each in dataclasses.fields(theirs)]
        yield from _apart(*([getattr(value, name) for name in names] for value in (ours, theirs)), where, numbers)
    elif isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            yield Difference(f"{where} has {len(ours)} items, eager's {len(theirs)}")
        else:
            for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                yield from _apart(one, other, f"{where} {at}", numbers)
    elif isinstance(theirs, (bool, int, float, complex, str, type(None))) and numbers:
        equal = ours == theirs or (ours != ours and theirs != theirs)
        if not equal:
            yield Difference(f"{where} is another number", f"{ours}, eager's {theirs}")


def _tensors_apart(ours: Tensor, theirs: Tensor, where: str, numbers: bool) -> Iterator[Difference]:
    for name, look in _LOOKS.items():
        found, wanted = look(ours), look(theirs)
        if found != wanted:
            yield Difference(f"{where}: {name}", f"{found}, eager's {wanted}")
            if name in _BASIC:
                return
    if numbers and not theirs.is_meta:
        yield from _numbers_apart(ours.detach(), theirs.detach(), where)


def _strides(tensor: Tensor) -> list[int] | None:
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return None
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


_BASIC = ("dtype", "layout", "device", "shape")

_LOOKS: Mapping[str, Callable[[Tensor], object]] = {
    "dtype": lambda tensor: tensor.dtype,
    "layout": lambda tensor: tensor.layout,
    "device": lambda tensor: tensor.device,
    "shape": lambda tensor: None if tensor.is_nested else tuple(tensor.shape),
    "strides": _strides,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "conjugate": lambda tensor: tensor.is_conj(),
    "negative": lambda tensor: tensor.is_neg(),
    "leaf": lambda tensor: tensor.is_leaf,
}


def _numbers_apart(ours: Tensor, theirs: Tensor, where: str) -> Iterator[Difference]:
    """A difference within the tolerances of PyTorch's tests is rounding.

    Linear algebra on a CPU rounds differently by the alignment of its inputs, and gradients add up in any order.
    """
    if theirs.layout is torch.strided and not theirs.is_quantized and not theirs.is_nested:
        ours, theirs = _comparable(ours), _comparable(theirs)
        if torch.equal(ours, theirs):
            return
    for tolerance, what in ((None, "numbers"), (0.0, ROUNDING)):
        try:
            torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            yield Difference(f"{where}: {what}", " ".join(str(error).split())[:200])
            return


def _comparable(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype that ``assert_close`` supports."""
    if tensor.dtype is torch.complex32:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def _relations(seen: Seen) -> list[str]:
    """For each output, the input or earlier output that it is or aliases, and its offset in bytes from that."""
    inputs = [(f"input {at}", tensor) for at, tensor in enumerate(seen.inputs)]
    outputs = [(f"output {at}", tensor) for at, tensor in enumerate(tensors_in(seen.result))]
    return [_relation(output, [*inputs, *outputs[:at]]) for at, (_, output) in enumerate(outputs)]


def _relation(output: Tensor, others: Sequence[tuple[str, Tensor]]) -> str:
    for name, other in others:
        if output is other:
            return f"{name} itself"
    for name, other in others:
        if (memory := _memory(output)) and (of_other := _memory(other)) and memory[0] == of_other[0]:
            return f"in the memory of {name}, {memory[1] - of_other[1]} bytes on"
    return "in memory of its own"


def _memory(tensor: Tensor) -> tuple[int, int] | None:
    """The storage of a tensor and its offset in bytes; ``None`` if it has no storage."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.untyped_storage()._cdata, tensor.storage_offset() * tensor.element_size()


# Running the samples


def check(variant: Variant, samples: int, options: Mapping[str, Any] = OPTIONS) -> Findings:
    """Call so many samples, spread evenly over the first :data:`_MOST`, or all (0), with and without ``optimize``."""
    findings, start = Findings(), time.perf_counter()
    torch._dynamo.reset()  # it compiles each function a few times only
    try:
        ours, theirs = ([_calls(variant, seed, samples) for seed in (0, 1)] for _ in range(2))
    except Exception as error:  # samples need a library or hardware that is missing
        findings.reasons.append(f"there are no samples: {type(error).__name__}: {str(error)[:200]}")
        return findings
    for at, (index, first) in enumerate(ours[0]):
        fast, found, raised = autostream.optimize(first.target, **options), [], True
        for turn in range(2):
            if at >= len(ours[turn]) or ours[turn][at][0] != index:
                continue  # another seed, another number of samples
            own, other = ours[turn][at][1], theirs[turn][at][1]
            own.target, other.target = first.target, theirs[0][at][1].target
            seen = observe(fast, own, variant.gradients), observe(other.target, other, variant.gradients)
            found += differences(*seen, numbers=variant.name not in UNINITIALIZED)
            raised &= seen[1].error is not None
        found = list(dict.fromkeys(found))
        if any(difference.what.endswith(ROUNDING) for difference in found):
            findings.rounded.append(index)
            found = [difference for difference in found if not difference.what.endswith(ROUNDING)]
        if found:
            unsteady = _unsteady(variant, samples, at)
            found = [difference for difference in found if difference.what not in unsteady]
        refused = [report.refusals[0].reason for report in fast.reports if report.mode == "plain"]
        found += [Difference("a schedule fails", reason) for reason in refused if "its schedule fails" in reason]
        if found:
            findings.differences[index] = found
        same = "both raise" if raised else "refused" if refused else "eager's"
        outcome = "different" if found else same
        findings.add(index, outcome, *([] if raised else refused))
    findings.seconds = time.perf_counter() - start
    return findings


def _calls(variant: Variant, seed: int, samples: int) -> list[tuple[int, Call]]:
    if not samples:
        return list(enumerate(variant.calls(seed)))
    found = list(itertools.islice(variant.calls(seed), _MOST))
    count = min(samples, len(found))
    last = len(found) - 1
    chosen = [at * last // (count - 1) for at in range(count)] if count > 1 else [last // 2] * count
    return [(at, found[at]) for at in chosen]


def _unsteady(variant: Variant, samples: int, at: int) -> set[str]:
    """The differences between two eager calls with the same seed."""
    found: set[str] = set()
    for seed in (0, 1):
        calls = [_calls(variant, seed, samples) for _ in range(2)]
        if at < len(calls[0]):
            one, other = (observe(call.target, call, variant.gradients) for _, call in (calls[0][at], calls[1][at]))
            found |= {difference.what for difference in differences(one, other)}
    return found


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise :class:`OutOfTime` after so many seconds, and again each second in case it is caught."""

    def ring(*_: Any) -> None:
        raise OutOfTime(f"it takes more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def check_all(
    variants: Sequence[Variant],
    samples: int,
    limit: float,
    known: Mapping[str, Known],
    options: Mapping[str, Any] = OPTIONS,
) -> list[Findings]:
    """Check one variant after another, and print differences as they are found."""
    found, start = [], time.perf_counter()
    for at, variant in enumerate(variants):
        try:
            with limited(limit):
                findings = check(variant, samples, options)
        except (Exception, OutOfTime) as error:
            findings = Findings()
            findings.add(0, "error", f"{type(error).__name__}: {str(error)[:200]}")
        found.append(findings)
        for index, several in findings.differences.items():
            for what, detail in several:
                print(_line(str(variant), index, what, detail, known), flush=True)
        if "error" in findings.outcomes.values() or not findings.outcomes:
            print(f"{variant}: {[*findings.reasons, 'there are no samples'][0]}", flush=True)
        if at % 100 == 99:
            print(f"{at + 1} of {len(variants)}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def _line(name: str, index: int | str, what: str, detail: str, known: Mapping[str, Known]) -> str:
    why = f" (known: {known[name].why})" if name in known else ""
    return f"{name}, sample {index}: {what}{f': {detail}' if detail else ''}{why}"


def unexpected(variants: Sequence[Variant], found: Sequence[Findings], known: Mapping[str, Known]) -> list[str]:
    """Variants that differ or have no result, and are not known to."""
    return [name for name, differs in _differing(variants, found).items() if differs and name not in known]


def gone(variants: Sequence[Variant], found: Sequence[Findings], known: Mapping[str, Known], samples: int) -> list[str]:
    """Variants that are known to differ and do not, though enough samples were run to show it."""
    shown = {0: known, SAMPLES: {name for name, each in known.items() if not each.rare}}.get(samples, ())
    return [name for name, differs in _differing(variants, found).items() if not differs and name in shown]


def _differing(variants: Sequence[Variant], found: Sequence[Findings]) -> dict[str, bool]:
    return {
        str(variant): not {"different", "error"}.isdisjoint(findings.outcomes.values())
        for variant, findings in zip(variants, found, strict=True)
    }


def representative(variants: Sequence[Variant]) -> list[Variant]:
    """What CI checks: all variants in float32 that were picked by hand, and a few of the others."""
    picked = [each for each in variants if _plain_name(each) in PICKED and each.dtype in ("float32", "any")]
    return [*picked, *[each for each in variants if _plain_name(each) not in PICKED][::EVERY]]


def _plain_name(variant: Variant) -> str:
    return variant.name.partition(" (")[0]


def table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The number of samples by kind and outcome, in Markdown."""
    rows = [[kind, *(count.get(outcome, 0) for outcome in OUTCOMES)] for kind, count in counts.items()]
    total = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    return tabulate([*rows, ["all", *total]], ["", *OUTCOMES], tablefmt="github", intfmt=",")


def markdown(written: Mapping[str, Any], command: str) -> str:
    """The results as a page: the table, then all differences with their reasons."""
    now, device, samples = written["stamp"], written["device"], written["samples"]
    where, machine = ("a GPU", f"one {now['gpu']}") if device == "cuda" else ("a CPU", now["cpu"])
    count = {0: "all samples", 1: "a sample"}.get(samples, f"{samples} samples")
    lines = [
        _line(name, at, *difference, KNOWN[device])
        for name, variant in written["variants"].items()
        for at, several in variant["differences"].items()
        for difference in several
    ]
    listed = "\n".join(f"- {line}" for line in sorted(lines)) or "Nothing."
    return f"""# PyTorch's own test databases on {where}

Each op and module of `op_db` and `module_db`, {count} of each variant, called twice with and without `optimize`:
`{command}` on {machine} with torch {now["torch"]} ({now["date"]}, commit {now["commit"]}).
*Refused* is a sample whose call runs the model itself, for a reason that its report gives.

{table(written["counts"])}

What differs, and why:

{listed}
"""


def _counts(variants: Sequence[Variant], found: Sequence[Findings]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for variant, findings in zip(variants, found, strict=True):
        kind = f"{variant.kind}{', gradients' if variant.gradients else ''}"
        counts.setdefault(kind, Counter()).update(findings.outcomes.values())
    return counts


def _summary(variants: Sequence[Variant], found: Sequence[Findings]) -> dict[str, Any]:
    reasons = Counter(reason for findings in found for reason in findings.reasons)
    return {
        "counts": {kind: dict(count) for kind, count in _counts(variants, found).items()},
        "reasons": dict(reasons.most_common()),
        "variants": {
            str(variant): {
                "outcomes": findings.outcomes,
                "differences": {at: [list(each) for each in several] for at, several in findings.differences.items()},
                "rounded": findings.rounded,
                "reasons": findings.reasons,
                "seconds": round(findings.seconds, 3),
            }
            for variant, findings in zip(variants, found, strict=True)
        },
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Samples with another outcome than in an earlier run; both are results as JSON."""
    found = []
    for name, variant in now["variants"].items():
        earlier = before["variants"].get(name, {"outcomes": {}})["outcomes"]
        for at, outcome in variant["outcomes"].items():
            if at in earlier and earlier[at] != outcome:
                found.append(f"{name}, sample {at}: {earlier[at]} before, {outcome} now")
    return found


def _chosen(asked: argparse.Namespace) -> list[Variant]:
    variants = variants_of(asked.device, asked.gradients)
    if asked.only is not None:
        names = {name for variant in variants for name in (variant.name, _plain_name(variant))}
        if unknown := set(asked.only) - names:
            raise ValueError(f"{min(unknown)}: neither an op nor a module")
        variants = [each for each in variants if {each.name, _plain_name(each)} & set(asked.only)]
    return representative(variants) if asked.representative else variants


def _checked(asked: argparse.Namespace, job: int) -> list[Findings]:
    """The results of one of the processes that share the work."""
    torch.set_num_threads(1)
    precise = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # eager's recurrent nets use TF32 by default
    with precise, tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        os.environ["AUTOSTREAM_CACHE_DIR"] = folder  # without schedules chosen in earlier runs
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        return check_all(_chosen(asked)[job :: asked.jobs], asked.samples, asked.limit, KNOWN[asked.device])


def main(argv: list[str] | None = None) -> int:
    """Check variants, write the results, and fail if the differences are not the known ones."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="to run on (default: cpu)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="ops and modules (default: all)")
    parser.add_argument("--representative", action="store_true", help="only what CI checks")
    parser.add_argument("--gradients", action=argparse.BooleanOptionalAction, default=True, help="record them too")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"of each variant; 0: all (default: {SAMPLES})")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes to share them (default: 1)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each variant (default: 120)")
    parser.add_argument("--before", type=Path, help="results of an earlier run: print which outcomes changed")
    parser.add_argument(
        "--out", type=Path, required=True, help="where to write the results: JSON, and a table as .md beside it"
    )
    asked = parser.parse_args(argv)
    if asked.jobs < 1:
        parser.error(f"--jobs {asked.jobs}: give at least one")
    start, now = time.perf_counter(), stamp()
    try:
        variants = _chosen(asked)
    except ValueError as error:
        parser.error(str(error))
    known = KNOWN[asked.device]
    if asked.jobs == 1:
        found = _checked(asked, 0)
    else:
        found = [Findings()] * len(variants)
        with ProcessPoolExecutor(asked.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            for job, findings in enumerate(pool.map(partial(_checked, asked), range(asked.jobs))):
                found[job :: asked.jobs] = findings
    settings = {name: value for name, value in vars(asked).items() if name not in ("out", "before")}
    head = {"schema": 1, "stamp": now, **settings, "seconds": round(time.perf_counter() - start)}
    written = json.loads(json.dumps({**head, **_summary(variants, found)}))
    asked.out.write_text(json.dumps(written, indent=1) + "\n")
    command = shlex.join(["python", "-m", "tests.conformance", *(sys.argv[1:] if argv is None else argv)])
    asked.out.with_suffix(".md").write_text(markdown(written, command))
    print(f"\n{table(written['counts'])}\n")
    new = unexpected(variants, found, known)
    old = gone(variants, found, known, asked.samples)
    other = [] if asked.before is None else changes(json.loads(asked.before.read_text()), written)
    for what, names in (("changed", other), ("not known", new), ("known, and gone", old)):
        print("\n".join(f"{what}: {name}" for name in names), end="\n" if names else "")
    return 1 if new or old else 0


if __name__ == "__main__":
    raise SystemExit(main())
