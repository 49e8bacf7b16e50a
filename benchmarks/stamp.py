"""What a result depends on besides the code that it measures."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


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
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cpus": os.cpu_count(),
    }


def save(name: str, result: dict[str, Any], table: str, folder: Path) -> None:
    """Write ``name.json`` and ``name.md`` into a folder, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / f"{name}.md").write_text(table + "\n")
    print(table)


def _commit() -> str | None:
    """The commit measured, with ``-dirty`` where the tree differs from it."""
    return os.environ.get("AUTOSTREAM_COMMIT") or _output("git", "describe", "--always", "--dirty", "--abbrev=12")


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
