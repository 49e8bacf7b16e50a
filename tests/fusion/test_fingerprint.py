"""Keys of programs: the same in every process, and another one as soon as anything differs that kernels depend on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.codegen import common
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import lowerings
from torch._subclasses import FakeTensorMode

from autostream.frontend.trace import trace
from autostream.fusion import fingerprint as module
from autostream.fusion.fingerprint import content_of, fingerprint, settings, surroundings
from autostream.fusion.inductor import with_settings
from autostream.fusion.kernel_json import NotSerializable
from autostream.ir import Placeholder, Program, Role

aten = torch.ops.aten

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150_000_000_000, uuid="?"
)


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)


def traced(model: nn.Module, *inputs: Tensor) -> Program:
    return trace(model, inputs, device="cuda:0").program


class Model(nn.Module):
    """With all sorts of arguments: lists, numbers, strings, dtypes, and results that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = nn.functional.gelu(self.norm(self.conv(x)), approximate="tanh")
        left, right = y.double().split(2, 1)
        return left.add_(0.5), right.permute(0, 2, 3, 1)


def model() -> Program:
    return traced(Model().eval(), torch.ones(2, 3, 8, 8))


# By hand, so that one thing at a time can differ


def by_hand(
    *,
    called: Any = aten.add.Tensor,
    args: tuple[Any, ...] = (1.0,),
    value: Callable[[], Tensor] = lambda: torch.empty(4, 6, device="cuda:0"),
    aliased: bool = False,
    in_place: bool = False,
    name: str = "x",
    role: Role = Role.INPUT,
    note: tuple[str, Any] = ("custom", {}),
    swapped: bool = False,
) -> Program:
    """``called(x, *args)``, and ``y``."""
    graph = fx.Graph()
    x, y = graph.placeholder(name), graph.placeholder("y")
    result = graph.call_function(called, (x, *args))
    result.name = "result"  # or else it says what is called
    outputs = (y, result) if swapped else (result, y)
    graph.output(outputs)
    with FakeTensorMode():
        x.meta["val"] = value()
        result.meta["val"] = x.meta["val"].detach() if in_place else torch.empty(4, 6, device="cuda:0")
        y.meta["val"] = x.meta["val"].detach() if aliased else value()
    result.meta[note[0]] = note[1]
    placeholders = (Placeholder(name, role, "0", name), Placeholder("y", Role.INPUT, "1", name if aliased else "y"))
    names = tuple(node.name for node in outputs)
    return Program(fx.GraphModule(nn.Module(), graph), placeholders, names, "aten", "cuda:0")


DIFFERENT: dict[str, dict[str, Any]] = {
    "operator": {"called": aten.sub.Tensor},
    "overload": {"called": aten.add.Scalar},
    "number": {"args": (2.0,)},
    "whole number": {"args": (1,)},
    "truth": {"args": (True,)},
    "list": {"args": ([1.0],)},
    "more arguments": {"args": (1.0, 1.0)},
    "dtype": {"value": lambda: torch.empty(4, 6, device="cuda:0", dtype=torch.float16)},
    "shape": {"value": lambda: torch.empty(4, 7, device="cuda:0")},
    "strides": {"value": lambda: torch.empty(6, 4, device="cuda:0").t()},
    "offset": {"value": lambda: torch.empty(5, 6, device="cuda:0").as_strided((4, 6), (6, 1), 6)},
    "larger storage": {"value": lambda: torch.empty(5, 6, device="cuda:0").as_strided((4, 6), (6, 1))},
    "device": {"value": lambda: torch.empty(4, 6, device="cuda:1")},
    "device of another kind": {"value": lambda: torch.empty(4, 6)},
    "gradients": {"value": lambda: torch.empty(4, 6, device="cuda:0", requires_grad=True)},
    "conjugate": {"value": lambda: torch.empty(4, 6, device="cuda:0", dtype=torch.complex64).conj()},
    "complex": {"value": lambda: torch.empty(4, 6, device="cuda:0", dtype=torch.complex64)},
    "shared memory": {"aliased": True},
    "a result in an argument's memory": {"in_place": True},
    "name": {"name": "z"},
    "role": {"role": Role.BUFFER},
    "note": {"note": ("custom", {"inlined": True})},
    "outputs": {"swapped": True},
}


def test_everything_that_differs_makes_a_key_of_its_own() -> None:
    keys = [fingerprint(by_hand(**each)) for each in ({}, *DIFFERENT.values())]
    assert len(set(keys)) == len(keys)
    assert fingerprint(by_hand()) == keys[0]


def test_models_that_are_alike_have_one_key() -> None:
    assert fingerprint(model()) == fingerprint(model())


def test_lines_of_source_code_make_no_difference() -> None:
    moved = model()
    for node in moved.module.graph.nodes:
        node.stack_trace = "somewhere else"
    assert fingerprint(moved) == fingerprint(model())


def test_a_key_is_the_same_in_every_process() -> None:
    program = """
        from tests.fusion.test_fingerprint import H200, model, torch
        from autostream.fusion.fingerprint import fingerprint
        torch.cuda.get_device_properties = lambda device: H200
        print(fingerprint(model()))
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate()[0].split()[-1] for process in both)
    assert first == second


# Settings and surroundings


def test_each_setting_of_inductor_makes_a_difference() -> None:
    before = fingerprint(by_hand())
    keys = []
    for patch in (
        config.patch(max_autotune=True),
        config.patch({"triton.unique_kernel_names": not config.triton.unique_kernel_names}),
        functorch_config.patch(functionalize_rng_ops=True),
    ):
        with patch:
            keys.append(fingerprint(by_hand()))
    assert len({before, *keys}) == 4
    assert fingerprint(by_hand()) == before


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", True),
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
        (torch, "__version__", "2.99"),
        (torch.version, "git_version", "0"),
        (torch.version, "cuda", "99.0"),
        (torch.backends.cudnn, "version", lambda: 99),
        (module, "VERSION", "99"),
        (module, "version", lambda package: "99"),
        (module, "code_in", lambda folder: "changed"),
    ],
)
def test_numerics_and_versions_make_a_difference(
    of: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(by_hand())
    monkeypatch.setattr(of, name, value)
    assert fingerprint(by_hand()) != before


def test_autocast_makes_a_difference() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        inside = fingerprint(by_hand())
    assert inside != fingerprint(by_hand())


@pytest.mark.parametrize("name", ["name", "major", "minor", "multi_processor_count", "total_memory"])
def test_another_device_makes_a_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**{**vars(H200), name: 1}))
    assert surroundings("cuda:0") != before


# What has no key


def foreign(*args: object) -> object:
    raise AssertionError


@pytest.fixture
def own_operator() -> Iterator[Any]:
    library = torch.library.Library("fingerprints", "DEF")
    library.define("own(Tensor x) -> Tensor")
    yield torch.ops.fingerprints.own.default
    library._destroy()


def test_an_operator_of_the_users_has_no_key(own_operator: Any) -> None:
    with pytest.raises(NotSerializable, match=r"fingerprints\.own\.default, which is not PyTorch's own"):
        fingerprint(by_hand(called=own_operator, args=()))


@pytest.mark.parametrize(
    "changed",
    [
        {"called": torch.cond},
        {"called": torch.relu},
        {"args": (1j,)},
        {"note": ("quantized", True)},
        {"note": ("custom", {"by": object()})},
        {"value": lambda: torch.empty(4, 6).to_sparse()},
    ],
)
def test_what_is_not_surely_known_has_no_key(changed: dict[str, Any]) -> None:
    with pytest.raises(NotSerializable):
        content_of(by_hand(**changed))


def test_a_tensor_that_is_real_or_held_has_no_key() -> None:
    real, held = by_hand(), by_hand()
    next(iter(real.module.graph.nodes)).meta["val"] = torch.ones(4, 6)
    held.module.register_buffer("constant", torch.ones(3))
    with held.module.graph.inserting_before(held.module.graph.output_node()):
        held.module.graph.get_attr("constant").meta = {}
    for program in (real, held):
        with pytest.raises(NotSerializable):
            content_of(program)


def test_sizes_that_data_tells_have_no_key() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0] * 2

    with pytest.raises(NotSerializable):
        content_of(traced(Chosen(), torch.ones(4)))


def test_settings_that_are_functions_have_no_key() -> None:
    with config.patch(post_grad_custom_pre_pass=foreign), pytest.raises(TypeError):
        fingerprint(by_hand())


@pytest.mark.parametrize("table", [lowerings, decompositions])
def test_lowerings_of_the_users_have_no_key(table: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table, aten.relu.default, foreign)
    with (
        with_settings({}),
        pytest.raises(NotSerializable, match=r"test_fingerprint\.foreign, which is not PyTorch's own"),
    ):
        settings()


def test_a_backend_of_the_users_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(common.custom_backend_passes, "cuda", foreign)  # type: ignore[arg-type]
    with pytest.raises(NotSerializable, match="a backend of Inductor's that is not its own"):
        settings()


def test_a_key_is_of_a_programs_arguments_whatever_the_order_of_its_fields() -> None:
    program = by_hand()
    assert fingerprint(replace(program, placeholders=program.placeholders[::-1])) != fingerprint(program)
