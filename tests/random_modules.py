"""Random modules, each compared with itself after ``optimize``.

    python -m tests.random_modules --examples 2000 --seed 0

A module is generated line by line, as Python source. Lines that raise are left out. What remains has views and writes
through them, ``out=``, buffers, dropout, and arguments and results in containers, some of which alias. On the CPU every
op changes the stream, and streams run in the most harmful orders.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import re
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import autostream
from autostream.runtime import runs
from autostream.runtime.emulator import ThreadedProgram, run_interleaved
from autostream.tuning import select
from tests.semantics import Inputs, Observed, force_streams, observe, same


def _several(text: str) -> Sequence[str]:
    return [template.strip() for template in text.split(";")]


VALUES = _several("""
    {x}.sin(); {x} + {y}; {x} * {n}; {x} - {y}; {x}.sigmoid(); {x}.clone(); {x} @ {z}; F.relu({x}); {x}.gt({y});
    torch.where({x} > 0, {x}, {y}); {x}.sum(); {x}.mean(0); torch.cat([{x}, {z}]); torch.stack([{x}, {y}]);
    {x}.cumsum(0); F.softmax({x}, -1); {x}.max(0); {x}.sort(stable=True); {x}.topk(1); torch.var_mean({x}, -1);
    {x}.argsort(stable=True); {x}.long(); {x}.int() // 2; {x}.double(); {x}.bfloat16(); {x}.roll(1, 0); {x}.flip(0);
    {x}.tril(); {x}.any(); {x}.gather(0, {y}.argsort(stable=True)); {x} * {x}.shape[0]; {x} * {z}.float().sum().item();
    torch.outer({x}, {z}); torch.zeros_like({x}); torch.arange(4, device={x}.device); {x}.new_full((4,), {n});
    F.pad({x}, (1, 0)); torch.stack([row.sin() for row in {x}]); torch._foreach_mul([{x}, {z}], {n});
    F.layer_norm({x}, {x}.shape[-1:]); torch.einsum("ij,kj->ik", {x}, {z}); {x}[{i}];
    torch.mul({x}, {y}, out=torch.zeros_like({x}));
    torch.sort({x}, dim=-1, stable=True, out=(torch.zeros_like({x}), torch.zeros_like({x}, dtype=torch.long)))
""")
"""Tensors made of others: ``x`` and ``z`` are any, ``y`` broadcasts to ``x``, ``n`` is a number, ``i`` indices."""

VIEWS = _several("""
    {x}[0]; {x}[1:]; {x}.t(); {x}.view(-1); {x}.reshape(-1); {x}[::2]; {x}[..., 1:]; {x}.detach(); {x}.contiguous();
    {x}.unsqueeze(0); {x}.squeeze(); {x}.expand(2, *{x}.shape); {x}.transpose(0, -1); {x}.diagonal(); {x}.view_as({x});
    {x}.chunk(2); {x}.split(1); {x}.unbind(-1); {x}.unfold(0, 2, 1); {x}.narrow(0, 1, 1); {x}.float();
    {x}.to({x}.dtype); {x}.flatten(); {x}.as_strided((2, 2), (1, 2));
    {x}.float().view(torch.int32); torch.broadcast_tensors({x}, {z})
""")

RANDOM = _several("""
    torch.rand_like({x}); F.dropout({x}, 0.5, self.training); F.dropout({x}, 0.5, True); {x}.sigmoid().bernoulli();
    torch.randn(4, device={x}.device); torch.randint_like({x}, 4); torch.empty_like({x}).normal_()
""")

WRITES = _several("""
    {x}.add_({y}); {x}.mul_({n}); {x}.zero_(); {x}.copy_({y}); {x}[0] = {n}; {x}[1:] += 1; {x} *= {y}; {x}.relu_();
    {x}[{x} > 0.5] = {n}; {x}[..., -1] = {z}.sum(); {x}.clamp_(-1, 1); {x}.masked_fill_({y} > 0, {n}); {x}.sin_();
    {x}.sub_({z}.sum()); {x}.lerp_({y}, 0.5); {x}.fill_({z}.max()); {x}.cumsum_(0); {x}.neg_(); {x}.uniform_();
    {x}.t_(); [row.mul_({n}) for row in {x}]; torch._foreach_add_([{x}], {n}); {x}.index_fill_(0, {i}, {n});
    {x}.logical_not_(); {x}.index_add_(0, {i}, {x}[{i}]); F.relu({x}, inplace=True);
    F.dropout({x}, 0.5, True, inplace=True); {x}.tril_()
""")
"""Writes to ``x``. Only ``y`` may share the memory that is written, and only element by element."""

OUTS = _several("""
    torch.sin({y}.expand_as({x}), out={x}); torch.add({x}, {y}, out={x}); torch.mul({y}.expand_as({x}), {n}, out={x});
    torch.where({x} > 0, {y}, {x}, out={x}); torch.mm({x}.clone(), {x}.clone(), out={x});
    torch.sum(torch.stack([{x}, {y}.expand_as({x})]), 0, out={x}); torch.cumsum({x}.clone(), 0, out={x});
    torch.cat([{x}[1:], {x}[:1]], out={x}.clone()); torch.cat([{x}[1:].clone(), {x}[:1].clone()], out={x})
""")
"""Ops that write their result into a tensor of its shape, mostly ``x``. For ``y`` the same holds as for writes."""

LAYERS = {
    "nn.Linear(4, 4)": "self.{m}({x}.float().reshape(-1, 4))",
    "nn.BatchNorm1d(4)": "self.{m}({x}.float().reshape(-1, 4))",
    "nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.2))": "self.{m}({x}.float().reshape(-1, 4))",
    "nn.GRUCell(4, 4)": "self.{m}({x}.float().reshape(-1, 4))",
    "nn.Embedding(4, 4)": "self.{m}({x}.long().remainder(4))",
    "nn.Dropout(0.5)": "self.{m}({x})",
}
"""Submodules, and how they are called."""

STATE = _several("""
    nn.Buffer(torch.zeros(4)); nn.Buffer(torch.randn(4, 4)); nn.Buffer(torch.arange(4), persistent=False);
    nn.Parameter(torch.randn(4)); nn.Parameter(torch.randn(4, 4)); {x}; nn.Buffer({x}[1:]); nn.Buffer({x}.view(-1))
""")

INPUTS = _several("""
    torch.randn(4, 4); torch.randn(4); torch.randn(2, 4); torch.randint(0, 4, (4,)); torch.randn(4, 4).t();
    torch.randn(4, 4) > 0; torch.randn(4, 4, dtype=torch.float64); torch.randn(4, 4).requires_grad_();
    torch.randn(8)[::2]; torch.randn(1, 4).expand(4, 4); torch.randn(0, 4); torch.tensor(2.0)
""")

ALIASES = _several("{x}; {x}[1:]; {x}.view(-1); {x}.t(); {x}[::2]; {x}[0]; {x}.detach(); {x}.expand(2, *{x}.shape)")

RESULTS = _several("""
    {}; ({}, {}); [{all}]; [{}, ({}, {})]; {{"a": {}, "b": [{}, None, 3]}}; ({}, {}, {}, {}.numel());
    ({}, [{}, {{"c": ({}, {}), "d": "text"}}]); ([{all}], "text"); ({}, [{all}]); {{"a": [{all}], "b": {}}}
""")


class RandomModule:
    """Source of a class ``Net``, and of a function ``inputs`` that returns positional and keyword arguments."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __repr__(self) -> str:
        return f"\n\n{self.source}\n"

    def __call__(self) -> tuple[Callable[[], nn.Module], Callable[[], Inputs]]:
        """The class and the function that the source defines."""
        scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "__name__": __name__}
        exec(self.source, scope)
        return scope["Net"], scope["inputs"]

    def returning_random_values(self) -> RandomModule:
        """The same, returning random values as well: AOTAutograd removes unused ops, random or not."""
        source = _RANDOM.sub(r"\g<0>\n\g<1>random_\g<2> = \g<2>.clone()", self.source)
        lines = _RANDOM.findall(self.source)
        names = ", ".join(f"random_{name}" for _, name in lines)
        return RandomModule(_RETURN.sub(rf"\g<1>, [{names}]", source)) if lines else self


_RANDOM = re.compile(r"^( +)(v\d+) = .*(?:rand|dropout|bernoulli|normal_|uniform_|self\.layer).*$", re.M)
_RETURN = re.compile(r"^( {8}return .*)$", re.M)


class Writer:
    """Generates lines and runs each at once, so that the next line can use the tensors that exist."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "self": nn.Module()}
        self._tensors: list[str] = []
        self._counter = itertools.count()

    def module(self) -> RandomModule:
        mode = f"self.train({self._draw(st.booleans())})"
        layers, state = self._layers(), self._state()
        assert self._runs(mode)
        inputs, parameters, call = self._inputs()
        lines = self._lines(layers)
        result = self._pick(RESULTS)
        chosen = [self._pick(self._tensors) for _ in range(result.count("{}"))]
        result = result.format(*chosen, all=", ".join(self._tensors))
        setting = [*layers, *state, mode]
        return RandomModule(
            "class Net(nn.Module):\n"
            + _indented(1, ["def __init__(self):"])
            + _indented(2, ["super().__init__()", *setting])
            + _indented(1, ["", f"def forward({parameters}):"])
            + _indented(2, [*lines, f"return {result}"])
            + "\n\ndef inputs():\n"
            + _indented(1, [*inputs, f"return {call}"])
        )

    def _pick(self, choices: Sequence[Any]) -> Any:
        return self._draw(st.sampled_from(choices))

    def _count(self, most: int) -> range:
        return range(self._draw(st.integers(0, most)))

    def _value(self, name: str) -> Tensor:
        value: Tensor = eval(name, self._scope)
        return value

    def _runs(self, line: str) -> bool:
        """Run a line; ``False`` if it raises."""
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("error")
                exec(line, self._scope)
        except Exception:
            return False
        return True

    def _layers(self) -> dict[str, str]:
        """Lines that make layers, with the template of a call of each."""
        layers = {}
        for at in self._count(2):
            maker = self._pick(list(LAYERS))
            line = f"self.layer{at} = {maker}"
            assert self._runs(line)
            layers[line] = LAYERS[maker].replace("{m}", f"layer{at}")
        return layers

    def _state(self) -> list[str]:
        """Lines that make parameters and buffers, some of which alias others."""
        lines = []
        for at in self._count(3):
            template = self._pick(STATE)
            if "{x}" not in template or self._tensors:
                line = f"self.s{at} = {template.format(x=self._pick(self._tensors) if self._tensors else '')}"
                if self._runs(line):
                    lines.append(line)
                    self._tensors.append(f"self.s{at}")
        return lines

    def _inputs(self) -> tuple[list[str], str, str]:
        """Lines that make inputs, some of which alias; the parameters of ``forward``; the arguments of a call."""
        lines: list[str] = []
        inputs: list[str] = []
        for at in range(self._draw(st.integers(1, 4))):
            alias = bool(inputs) and self._draw(st.booleans())
            line = f"x{at} = {self._pick(ALIASES).format(x=self._pick(inputs)) if alias else self._pick(INPUTS)}"
            if self._runs(line):
                lines.append(line)
                inputs.append(f"x{at}")
        kinds = {name: self._pick(["plain", "item", "keyword", "entry"]) for name in inputs}
        plain, items, keywords, entries = (
            [name for name in inputs if kinds[name] == kind] for kind in ("plain", "item", "keyword", "entry")
        )
        self._scope |= {"items": [self._value(name) for name in items]}
        self._scope |= {"table": {name: self._value(name) for name in entries}}
        self._tensors += [*plain, *(f"items[{at}]" for at in range(len(items)))]
        self._tensors += [*keywords, *(f'table["{name}"]' for name in entries)]
        args = [*plain, *(["items"] if items else [])]
        kwargs = [*keywords, *(["table"] if entries else [])]
        lines += [f"items = [{', '.join(items)}]"] if items else []
        lines += [f"table = {_mapping(entries)}"] if entries else []
        parameters = ["self", *args, *(["*", *kwargs] if kwargs else [])]
        return lines, ", ".join(parameters), f"[{', '.join(args)}], {_mapping(kwargs)}"

    def _lines(self, layers: Mapping[str, str]) -> list[str]:
        rest = [RANDOM, OUTS, *([list(layers.values())] if layers else [])]
        kinds = [VALUES, VIEWS, WRITES, VALUES, VIEWS, WRITES, *rest]
        return [line for _ in range(self._draw(st.integers(1, 24))) if (line := self._line(self._pick(kinds)))]

    def _line(self, templates: Sequence[str]) -> str:
        """A line that has run, or ``""`` if it cannot."""
        template, target = self._pick(templates), self._pick(self._tensors)
        x = self._value(target)
        fitting = self._pick([name for name in self._tensors if _broadcasts(self._value(name), x)])
        if templates in (WRITES, OUTS):
            if not _is_writable(x):
                return ""
            if not _is_safe(x, self._value(fitting)):
                fitting = f"{fitting}.clone()"
        indices = [f"torch.tensor({index}, device={target}.device)" for index in ([1], [2, 0])]
        line = template.format(
            x=target,
            y=fitting,
            z=self._pick(self._tensors) if "{z}" in template else "",
            n=self._pick([0.5, 2, -1.5]) if "{n}" in template else "",
            i=self._pick(indices) if "{i}" in template else "",
        )
        name = f"v{next(self._counter)}"
        line = line if "= " in line else f"{name} = {line}"
        if not self._runs(line):
            return ""
        self._keep(name)
        return line

    def _keep(self, name: str) -> None:
        value = self._scope.get(name)
        named = {name: value} if isinstance(value, Tensor) else {}
        if isinstance(value, (list, tuple)):
            named = {f"{name}[{at}]": item for at, item in enumerate(value) if isinstance(item, Tensor)}
        self._tensors += [name for name, tensor in named.items() if tensor.numel() <= _LARGEST and tensor.dim() <= 4]


_LARGEST = 256
"""The most elements of a tensor that later lines use."""


def _indented(depth: int, lines: Sequence[str]) -> str:
    return textwrap.indent("".join(f"{line}\n" for line in lines), depth * "    ")


def _mapping(names: Sequence[str]) -> str:
    return "{" + ", ".join(f'"{name}": {name}' for name in names) + "}"


def _broadcasts(tensor: Tensor, to: Tensor) -> bool:
    sizes = zip(reversed(tensor.shape), reversed(to.shape), strict=False)
    return tensor.dim() <= to.dim() and all(size in (1, wanted) for size, wanted in sizes)


def _elements(tensor: Tensor) -> list[int]:
    """The offset of each element in the storage, in bytes."""
    size = tensor.element_size()
    offsets = torch.arange(tensor.untyped_storage().nbytes() // size)
    return (offsets.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten() * size).tolist()


def _is_writable(tensor: Tensor) -> bool:
    """Whether no two elements share memory: the value after a write would be undefined."""
    offsets = _elements(tensor)
    return len(offsets) == len(set(offsets))


def _is_safe(target: Tensor, source: Tensor) -> bool:
    """Whether each element is read before it is written, in any order of elements."""
    if target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr():
        return True
    apart = set(_elements(target)).isdisjoint(_elements(source))
    return apart or (_elements(target) == _elements(source) and target.dtype == source.dtype)


@st.composite
def random_modules(draw: st.DrawFn) -> RandomModule:
    """A module of up to 24 lines, and inputs for it."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Writer(draw).module()


class Hostile(ThreadedProgram):
    """First checks that the most harmful orders that the waits allow give the same results, then runs in threads."""

    def __init__(self, lowered: fx.GraphModule) -> None:
        super().__init__(lowered)
        self._lowered = lowered

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        generator = torch.get_rng_state()
        inputs = [tensor.detach() for tensor in args]
        runs = []
        for order in range(4):
            torch.set_rng_state(generator)
            copies = copy.deepcopy(inputs)
            runs.append((*run_interleaved(self._lowered, copies, order), *copies))
        torch.set_rng_state(generator)
        results = super().__call__(*args)
        for tensors in runs:
            torch.testing.assert_close(tensors, (*results, *args), rtol=0, atol=0, equal_nan=True, check_stride=False)
        return results


def hostile_streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Select a schedule whose ops change the stream each time; returns the options to optimize with."""
    monkeypatch.setattr(runs, "ThreadedProgram", Hostile)
    monkeypatch.setattr(select, "_timer", lambda *_: lambda: 1.0)
    return force_streams(monkeypatch)


CallSequence = Sequence[tuple[Callable[[], AbstractContextManager[Any]], bool]]
"""Successive calls: the mode of each, and whether inputs that alias do so in this call."""

CALL_SEQUENCES: Mapping[str, CallSequence] = {
    "aliases": ((torch.no_grad, False), (torch.no_grad, True), (torch.no_grad, True)),
    "inference mode": ((torch.no_grad, True), (torch.inference_mode, True), (torch.no_grad, True)),
    "gradients": ((torch.no_grad, True), (torch.enable_grad, True), (torch.no_grad, True)),
}
"""By what changes between the calls."""


def check(
    module: RandomModule,
    options: Mapping[str, Any],
    calls: CallSequence = CALL_SEQUENCES["aliases"],
    device: str = "cpu",
    tolerance: float = 0.0,
) -> Counter[str]:
    """Call a module and its optimized self; all that can be observed must be the same, at once and in the end.

    Values, random ones too, differ between calls. Returns how often each mode occurs, or reason to have no schedule.
    """
    records = any(mode is torch.enable_grad for mode, _ in calls)
    if records:  # AOTAutograd merges common subexpressions, and adds up gradients in another order
        tolerance = max(tolerance, 1e-6)
    net, inputs = (module.returning_random_values() if records else module)()
    (ours, theirs), seen = (_made(net, device, seed=0) for _ in range(2)), []
    fast = autostream.optimize(ours, **options)
    for number, (mode, aliased) in enumerate(calls):
        one, other = (_made(inputs, device, seed=number) for _ in range(2))
        one, other = (one, other) if aliased else (_apart(one), _apart(other))
        with mode():
            pair = (observe(fast, ours, one, number), observe(theirs, theirs, other, number))
            if mode is torch.enable_grad:
                if isinstance(pair[1].result, tuple) and isinstance(pair[1].result[0], type):
                    break  # AOTAutograd may accept what eager autograd refuses
                pair = (_by_memory(pair[0]), _by_memory(pair[1]))
            seen.append(pair)
            same(*pair, tolerance)
    for one, other in seen:
        same(one, other, tolerance)
    fates = [report.refusals[0].reason if report.refusals else report.mode for report in fast.reports]
    # What AOTAutograd refuses with gradients, such as writes to views of tensors without, runs eagerly.
    assert not any("it cannot be scheduled" in fate and "aot_autograd" not in fate for fate in fates), fates
    return Counter(fates)


def _by_memory(observed: Observed) -> Observed:
    """Without object identity: of inputs that overlap and are written, AOTAutograd returns views."""
    return replace(observed, relations=[(memory, memory) for _, memory in observed.relations])


def _made(maker: Callable[[], Any], device: str, seed: int) -> Any:
    torch.manual_seed(seed)
    with torch.device(device):
        return maker()


def _apart(inputs: Inputs) -> Inputs:
    """The same inputs, each in its own memory."""

    def copied(tensor: Tensor) -> Tensor:
        return copy.deepcopy(tensor.detach()).requires_grad_(tensor.requires_grad)

    separate: Inputs = tree_map_only(Tensor, copied, inputs)
    return separate


def runs_on(device: str, net: Callable[[], nn.Module], inputs: Callable[[], Inputs]) -> bool:
    """Whether a device has all ops of a module, which was generated on the CPU.

    Where it has not, the eager module raises, but fused kernels may not, because unused ops are removed.
    """
    args, kwargs = _made(inputs, device, seed=0)
    try:
        with torch.no_grad():
            _made(net, device, seed=0)(*args, **kwargs)
    except NotImplementedError:
        return False
    return True


TOLERANCE = {"eager": 0.0, "inductor": 1e-3}
"""By level of kernels: fused ones round in other places."""


def main(arguments: Sequence[str]) -> None:
    """Check a number of modules, and print their modes; the first that fails is shrunk and printed."""
    parser = argparse.ArgumentParser(prog="python -m tests.random_modules", description=main.__doc__)
    parser.add_argument("--examples", type=int, default=2000, help="how many modules (default: 2000)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--device", default="cpu", help="where they run (default: cpu)")
    parser.add_argument("--kernels", default="eager", choices=TOLERANCE, help="what one op is (default: eager)")
    asked = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    tally: Counter[str] = Counter()
    modules, start = itertools.count(), time.monotonic()

    @seed(asked.seed)
    @settings(
        max_examples=asked.examples,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(random_modules(), st.sampled_from(list(CALL_SEQUENCES)))
    def run(module: RandomModule, calls: str) -> None:
        assume(runs_on(asked.device, *module()))
        tally.update(check(module, options, CALL_SEQUENCES[calls], asked.device, TOLERANCE[asked.kernels]))
        torch._dynamo.reset()
        next(modules)

    with pytest.MonkeyPatch.context() as patch:
        options = {**hostile_streams(patch), "kernels": asked.kernels}
        run()
    count, seconds = next(modules), time.monotonic() - start
    print(f"{count} modules, seed {asked.seed}, torch {torch.__version__}, {seconds:.0f} s: all did the same")
    for fate, times in tally.most_common():
        print(f"{times:6} {fate}")


if __name__ == "__main__":
    main(sys.argv[1:])
