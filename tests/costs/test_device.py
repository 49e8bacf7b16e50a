"""Device profiles: known GPUs by datasheet, others by the driver's properties, and helpful errors."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from autostream.costs.device import known_names, profile_named, profile_of
from autostream.errors import TargetError


def _driver(monkeypatch: pytest.MonkeyPatch, **properties: object) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))


def test_a_profile_has_shares_of_the_datasheets_numbers() -> None:
    profile = profile_named("h200")
    assert profile.multiprocessors == 132
    assert profile.bandwidth == pytest.approx(0.85 * 4.8e12 / 1e6)
    assert profile.flops["float16"] == pytest.approx(0.75 * 989.5e12 / 1e6)
    assert profile.cache_bytes == 60 * 2**20
    assert profile.flops["float8_e4m3fn"] == 2 * profile.flops["bfloat16"]
    assert profile.source == "table"


@pytest.mark.parametrize(
    ("name", "link", "peer"), [("h200", 64, 450), ("a100-40gb", 32, 300), ("l4", 32, 32), ("t4", 16, 16)]
)
def test_links_have_85_percent_of_pcie_or_nvlink(name: str, link: int, peer: int) -> None:
    """GB/s; GPUs without NVLink reach their peers over PCIe."""
    profile = profile_named(name)
    assert profile.link_bandwidth == pytest.approx(0.85 * link * 1e3)
    assert profile.peer_bandwidth == pytest.approx(0.85 * peer * 1e3)


@pytest.mark.parametrize("name", known_names())
def test_every_profile_is_complete_and_consistent(name: str) -> None:
    profile = profile_named(name)
    assert profile.multiprocessors > 0
    assert profile.bandwidth > 0
    assert profile.kernel_us > 0
    assert set(profile.flops) >= {"float64", "float32", "float16", "bfloat16", "float8_e5m2", "int8"}
    assert min(profile.flops.values()) > 0
    if name != "cpu":
        assert profile_named(profile.name) == profile, "by the driver's name"
        assert profile.cache_bytes >= 4 * 2**20
        assert 0 < profile.dispatch_us < profile.same_stream_edge_us < profile.cross_stream_edge_us < profile.launch_us
        assert profile.flops["float64"] <= profile.flops["float32"] < profile.flops["float16"]


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("H100", 3.35e6),
        ("NVIDIA H100 PCIe", 2.0e6),
        ("a100", 2.039e6),
        ("NVIDIA A100-PCIE-40GB", 1.555e6),
        ("l4", 0.3e6),
        ("NVIDIA L40S", 0.864e6),
        ("Tesla T4", 0.32e6),
    ],
)
def test_variants_of_a_gpu_have_rows_of_their_own(name: str, bandwidth: float) -> None:
    assert profile_named(name).bandwidth == pytest.approx(0.85 * bandwidth)


def test_a_dtype_without_a_unit_of_its_own_has_the_speed_of_float32() -> None:
    t4 = profile_named("t4").flops
    assert t4["bfloat16"] == t4["float8_e4m3fn"] == t4["float32"]


@pytest.mark.parametrize("name", ["h2000", "GH200", "NVIDIA H200 NVL", "", "3090"])
def test_an_unknown_name_raises_an_error_with_the_known_ones(name: str) -> None:
    with pytest.raises(TargetError, match="h200, h100-pcie, h100, a100-40gb"):
        profile_named(name)


def test_a_known_gpu_of_this_machine_has_a_row_unless_it_is_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    _driver(monkeypatch, name="NVIDIA A100-PCIE-40GB", multi_processor_count=108, major=8, minor=0)
    profile = profile_of("cuda:0")
    assert (profile.name, profile.source) == ("NVIDIA A100-PCIE-40GB", "table")
    _driver(monkeypatch, name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", multi_processor_count=42, major=8, minor=0)
    profile = profile_of("cuda:0")
    assert (profile.multiprocessors, profile.source) == (42, "properties")


def test_an_unknown_gpu_is_derived_from_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # An RTX 3090: 82 SMs at 1.695 GHz; 256 float32 operations per SM and clock are 35.6 TFLOP/s; 936 GB/s.
    _driver(
        monkeypatch,
        name="NVIDIA GeForce RTX 3090",
        multi_processor_count=82,
        major=8,
        minor=6,
        clock_rate=1_695_000,
        memory_clock_rate=9_751_000,
        memory_bus_width=384,
        L2_cache_size=6 * 2**20,
    )
    profile = profile_of("cuda")
    assert profile.flops["float32"] == pytest.approx(0.75 * 35.6e6, rel=0.01)
    assert profile.flops["float16"] == pytest.approx(0.75 * 4 * 35.6e6, rel=0.01)
    assert profile.bandwidth == pytest.approx(0.85 * 936e3, rel=0.01)
    assert profile.cache_bytes == 6 * 2**20
    assert profile.source == "properties"
    assert profile.link_bandwidth == profile.peer_bandwidth == pytest.approx(0.85 * 32e3)


def test_missing_properties_and_unknown_architectures_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    _driver(monkeypatch, name="NVIDIA Z1", multi_processor_count=10, major=99, minor=0)
    profile = profile_of("cuda:0")
    assert profile.bandwidth > 0
    assert min(profile.flops.values()) > 0
    assert profile.cache_bytes == 0
    flops = {}
    for minor in (6, 7, 9):  # 8.7 counts as 8.6
        _driver(monkeypatch, name="A", major=8, minor=minor, multi_processor_count=10, clock_rate=1_000_000)
        flops[minor] = profile_of("cuda:0").flops
    assert flops[6] == flops[7]
    assert flops[7]["float8_e5m2"] < flops[9]["float8_e5m2"]


def test_the_cpu_has_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    three = profile_of("cpu")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    one = profile_of("cpu")
    assert three.multiprocessors == 3
    assert three.flops["float32"] == pytest.approx(3 * one.flops["float32"])
    assert profile_named("CPU") == one


@pytest.mark.parametrize("device", ["mps", "cuda:x", "h200", ""])
def test_a_device_of_another_type_is_refused(device: str) -> None:
    with pytest.raises(TargetError, match="use 'cpu', 'cuda' or 'cuda:N'"):
        profile_of(device)


def test_a_gpu_that_is_not_on_this_machine_is_refused_with_names_to_plan_for() -> None:
    with pytest.raises(TargetError, match=r"'cuda:97' is not on this machine .*: .*h200"):
        profile_of("cuda:97")


@pytest.mark.gpu
def test_the_gpu_of_this_machine_has_a_profile() -> None:
    profile = profile_of("cuda:0")
    assert profile.name == torch.cuda.get_device_name(0)
    assert profile.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    assert profile.cache_bytes >= 4 * 2**20
