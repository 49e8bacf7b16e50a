"""Keys of programs: the same in every process, and different if anything differs that kernels depend on."""

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


def by_hand(
    *,
    called: Any = aten.add.Tensor,
    args: tuple[Any, ...] = (1.0,),
    value: Callable[[], Tensor] = lambda: torch.empty(4, 6, device="cuda:0"),
    aliased: bool = False,
    in_place: bool = False,
    name: str = "x",
    role: Role = Role.INPUT,
    meta: tuple[str, Any] = ("custom", {}),
    swapped: bool = False,
) -> Program:
    """A program that returns ``called(x, *args)`` and ``y``, in which one property at a time can differ."""
    graph = fx.Graph()
    x, y = graph.placeholder(name), graph.placeholder("y")
    result = graph.call_function(called, (x, *args))
    result.name = "result"  # by default, the name tells what is called
    outputs = (y, result) if swapped else (result, y)
    graph.output(outputs)
    with FakeTensorMode():
        x.meta["val"] = value()
        result.meta["val"] = x.meta["val"].detach() if in_place else torch.empty(4, 6, device="cuda:0")
        y.meta["val"] = x.meta["val"].detach() if aliased else value()
    result.meta[meta[0]] = meta[1]
    placeholders = (Placeholder(name, role, "0", name), Placeholder("y", Role.INPUT, "1", name if aliased else "y"))
    names = tuple(node.name for node in outputs)
    return Program(fx.GraphModule(nn.Module(), graph), placeholders, names, "aten", "cuda:0")


DIFFERENT: dict[str, dict[str, Any]] = {
    "operator": {"called": aten.sub.Tensor},
    "overload": {"called": aten.add.Scalar},
    "number": {"args": (2.0,)},
    "int": {"args": (1,)},
    "bool": {"args": (True,)},
    "list": {"args": ([1.0],)},
    "more arguments": {"args": (1.0, 1.0)},
    "dtype": {"value": lambda: torch.empty(4, 6, device="cuda:0", dtype=torch.float16)},
    "shape": {"value": lambda: torch.empty(4, 7, device="cuda:0")},
    "strides": {"value": lambda: torch.empty(6, 4, device="cuda:0").t()},
    "offset": {"value": lambda: torch.empty(5, 6, device="cuda:0").as_strided((4, 6), (6, 1), 6)},
    "larger storage": {"value": lambda: torch.empty(5, 6, device="cuda:0").as_strided((4, 6), (6, 1))},
    "another GPU": {"value": lambda: torch.empty(4, 6, device="cuda:1")},
    "CPU": {"value": lambda: torch.empty(4, 6)},
    "gradients": {"value": lambda: torch.empty(4, 6, device="cuda:0", requires_grad=True)},
    "conjugate": {"value": lambda: torch.empty(4, 6, device="cuda:0", dtype=torch.complex64).conj()},
    "complex": {"value": lambda: torch.empty(4, 6, device="cuda:0", dtype=torch.complex64)},
    "aliased arguments": {"aliased": True},
    "a result that aliases an argument": {"in_place": True},
    "name": {"name": "z"},
    "role": {"role": Role.BUFFER},
    "custom metadata": {"meta": ("custom", {"inlined": True})},
    "outputs": {"swapped": True},
}


def test_everything_that_kernels_depend_on_changes_the_key() -> None:
    keys = [fingerprint(by_hand(**each)) for each in ({}, *DIFFERENT.values())]
    program = by_hand()
    keys.append(fingerprint(replace(program, placeholders=program.placeholders[::-1])))
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(fingerprint(program))
    for patch in (
        config.patch(max_autotune=True),
        config.patch({"triton.unique_kernel_names": not config.triton.unique_kernel_names}),
        functorch_config.patch(functionalize_rng_ops=True),
    ):
        with patch:
            keys.append(fingerprint(program))
    assert len(set(keys)) == len(keys)
    program.module.graph.output_node().prev.stack_trace = "another line of source code"
    assert fingerprint(program) == keys[0]


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        (torch.backends.cudnn, "deterministic", True),
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
def test_numerics_and_versions_change_the_key(of: Any, name: str, value: object, monkeypatch: Any) -> None:
    before = fingerprint(by_hand())
    monkeypatch.setattr(of, name, value)
    assert fingerprint(by_hand()) != before


@pytest.mark.parametrize("name", ["name", "major", "minor", "multi_processor_count", "total_memory"])
def test_another_device_changes_the_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = surroundings("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**{**vars(H200), name: 1}))
    assert surroundings("cuda:0") != before


class Model(nn.Module):
    """A model whose arguments are lists, numbers, strings and dtypes, and whose results alias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = nn.functional.gelu(self.norm(self.conv(x)), approximate="tanh")
        left, right = y.double().split(2, 1)
        return left.add_(0.5), right.permute(0, 2, 3, 1)


def model() -> Program:
    return trace(Model().eval(), (torch.ones(2, 3, 8, 8),), device="cuda:0").program


def test_a_key_is_the_same_in_another_process() -> None:
    program = """
        from tests.fusion.test_fingerprint import H200, model, torch
        from autostream.fusion.fingerprint import fingerprint
        torch.cuda.get_device_properties = lambda device: H200
        print(fingerprint(model()))
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.split()[-1] == fingerprint(model())


# Programs and settings without a key


def foreign(*args: object) -> object:
    raise AssertionError


@pytest.fixture
def custom_operator() -> Iterator[Any]:
    library = torch.library.Library("fingerprints", "DEF")
    library.define("custom(Tensor x) -> Tensor")
    yield torch.ops.fingerprints.custom.default
    library._destroy()


def test_a_custom_operator_has_no_key(custom_operator: Any) -> None:
    with pytest.raises(NotSerializable, match=r"fingerprints\.custom\.default, which is not PyTorch's own"):
        fingerprint(by_hand(called=custom_operator, args=()))


def real_value() -> Program:
    program = by_hand()
    next(iter(program.module.graph.nodes)).meta["val"] = torch.ones(4, 6)
    return program


def constant() -> Program:
    program = by_hand()
    program.module.register_buffer("constant", torch.ones(3))
    with program.module.graph.inserting_before(program.module.graph.output_node()):
        program.module.graph.get_attr("constant").meta = {}
    return program


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0] * 2


@pytest.mark.parametrize(
    "program",
    [
        lambda: by_hand(called=torch.cond),
        lambda: by_hand(called=torch.relu),
        lambda: by_hand(args=(1j,)),
        lambda: by_hand(meta=("quantized", True)),
        lambda: by_hand(meta=("custom", {"by": object()})),
        lambda: by_hand(value=lambda: torch.empty(4, 6).to_sparse()),
        real_value,
        constant,
        lambda: trace(Masked(), (torch.ones(4),), device="cuda:0").program,
    ],
    ids=["nested graph", "function", "complex", "metadata", "object", "sparse", "real tensor", "constant", "data"],
)
def test_a_program_with_unknown_parts_has_no_key(program: Callable[[], Program]) -> None:
    with pytest.raises(NotSerializable):
        content_of(program())


def test_settings_that_are_functions_have_no_key() -> None:
    with config.patch(post_grad_custom_pre_pass=foreign), pytest.raises(TypeError):
        fingerprint(by_hand())


@pytest.mark.parametrize(
    ("table", "key", "match"),
    [
        (lowerings, aten.relu.default, r"test_fingerprint\.foreign, which is not PyTorch's own"),
        (decompositions, aten.relu.default, r"test_fingerprint\.foreign, which is not PyTorch's own"),
        (common.custom_backend_passes, "cuda", "a backend of Inductor's that is not its own"),
    ],
)
def test_lowerings_and_backends_of_the_user_have_no_key(table: Any, key: Any, match: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(table, key, foreign)
    with with_settings({}), pytest.raises(NotSerializable, match=match):
        settings()
