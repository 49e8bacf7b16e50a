"""What all measurements have: a stamp with machine, versions, commit and time, and a folder where they are saved."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"

LIBRARIES = ("torchvision", "timm", "transformers", "triton", "networkx")
"""Libraries whose versions a stamp has, if they are installed."""


def stamp() -> dict[str, Any]:
    """Machine, versions, commit and time of a measurement."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _output("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cpus": os.cpu_count(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        **_versions(),
    }


def saving_parser(name: str, about: str) -> argparse.ArgumentParser:
    """The parser of a benchmark that saves what it measures, with ``--out``; its first line says what it is about."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "latest", help="folder for the JSON, tables and plots")
    return parser


def earlier_rows(name: str, folder: Path, now: Mapping[str, Any], **same: Any) -> list[dict[str, Any]]:
    """The rows of ``name.json`` in a folder, if it is of the same commit and machine.

    Args:
        name: of the benchmark.
        folder: where results are written to.
        now: the stamp of this run, which must be equal but for the date.
        same: other keys of the file that must be equal.
    """
    try:
        earlier = json.loads((folder / f"{name}.json").read_text())
    except (FileNotFoundError, ValueError, RecursionError):  # a damaged one is measured again
        return []
    match earlier:
        case {"stamp": dict(stamped), "rows": list(rows), **settings}:
            known = {**stamped, "date": None} == {**now, "date": None}
            return rows if known and same.items() <= settings.items() else []
    return []


def save(name: str, result: dict[str, Any], table: str, folder: Path) -> None:
    """Write ``name.json`` and ``name.md`` into a folder, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / f"{name}.md").write_text(table + "\n")
    print(table)


def _commit() -> str | None:
    """The commit measured, with ``-dirty`` where the tree differs from it.

    It is that of this package's own repository, wherever the command runs. A copy without a repository, as on a machine
    that gets only the files, is told its commit by the environment variable ``AUTOSTREAM_COMMIT``.
    """
    here = str(Path(__file__).parent)
    return os.environ.get("AUTOSTREAM_COMMIT") or _output(
        "git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _cpu() -> str:
    """The CPU's model on Linux, else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
