"""Commands about this machine: ``profile`` measures its GPU, ``env`` prints versions and settings."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import torch

from autostream.cli.command import Command, argument
from autostream.cli.shared import DEVICE, JSON, OUT
from autostream.cli.targets import parse_device
from autostream.cli.terminal import message, progress, require_writable, show
from autostream.costs.device import profile_of
from autostream.costs.measured import METHOD
from autostream.costs.records import Measurements, context_of, to_json
from autostream.costs.this_device import profile_anew
from autostream.errors import TargetError, first_line
from autostream.options import cache_folder, environment
from autostream.pipeline import versions
from autostream.reporting import text
from autostream.reporting.tables import count, line, pairs, size

_PACKAGES = ("triton", "torchvision", "timm", "transformers", "networkx", "tabulate", "filelock")
"""Required and optional dependencies."""


def _profile(arguments: argparse.Namespace) -> int:
    device = parse_device(arguments.device)
    if device.type == "cpu":
        raise TargetError("--device cpu: a processor is not measured: run it where the GPU is")
    if arguments.out and arguments.out.suffix != ".json":
        raise TargetError(f"--out {arguments.out}: name a file that ends in .json, as --device does")
    require_writable(arguments.out)
    try:
        with progress(f"measuring {device}"):
            measured, notes = profile_anew(str(device))
    except RuntimeError as error:
        raise TargetError(
            f"--device {device}: it could not be measured: {first_line(error)}; free it and try again"
        ) from error
    for each in notes:
        message(f"{each.choice}: {each.reason}")
    if arguments.out:
        context = context_of(str(device), profile_of(str(device)), METHOD)
        show(to_json(Measurements(context, measured)), arguments.out)
    else:
        show(text.profile(measured), report=True)
    return 0


def _env(arguments: argparse.Namespace) -> int:
    facts = dict(_facts())
    if arguments.form == "json":
        show(json.dumps(facts, indent=1), arguments.out)
    elif arguments.form == "bug report":
        show(bug_report("\n".join(f"{key:11} {each}" for key, each in _lines(facts))), arguments.out)
    else:
        show(pairs((key, line(f"{each}")) for key, each in _lines(facts)), arguments.out, report=True)
    return 0


def bug_report(environment: str) -> str:
    """A report of a fault, to be filled in, in Markdown; the project's issue template is one without an environment."""
    return f"""**What happens, and what should**

**A script that shows it** (random weights will do)

```python
import autostream
```

**Where it goes away**: with `AUTOSTREAM_DISABLE=1`? With `kernels="eager"`? With `policy="sequential"`?

**What `AUTOSTREAM_VERIFY=paranoid` says**, if results differ

**`print(autostream.explain(fast))`**

```text
```

**`autostream env`** (`autostream env --bug-report` fills it in)

```text
{environment}
```
"""


def _facts() -> Iterator[tuple[str, object]]:
    """The environment for bug reports, by subject: strings, lists and dicts of strings."""
    yield "versions", versions() | {name: _version(name) for name in _PACKAGES}
    yield "system", platform.platform()
    yield "cpu", f"{count(os.cpu_count() or 0, 'core')}, {count(torch.get_num_threads(), 'thread')} of PyTorch"
    yield "gpus", [_gpu(at) for at in range(torch.cuda.device_count())]
    yield "graphviz", shutil.which("dot") or "not installed: no --svg"
    yield "kept in", _cache()
    yield "set", environment()


def _lines(facts: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """A line for each string; "none" for an empty subject."""
    for key, value in facts.items():
        match value:
            case dict():
                yield from ((key, f"{name} {each}") for name, each in value.items())
            case list():
                yield from ((key, each) for each in value)
            case _:
                yield key, value
        if not value:
            yield key, "none"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _gpu(at: int) -> str:
    known = torch.cuda.get_device_properties(at)
    profile = profile_of(f"cuda:{at}").source
    of = f"{count(known.multi_processor_count, 'SM')}, {size(known.total_memory)}, compute {known.major}.{known.minor}"
    return f"cuda:{at} {known.name}: {of} (profile: {profile}, unless it was measured)"


def _cache() -> str:
    try:
        folder: Path = cache_folder()
    except FileNotFoundError as error:
        return f"nowhere: {error}"
    if not folder.is_dir():
        return f"{folder}, not made yet"
    files = [path for path in folder.rglob("*") if path.is_file()]
    return f"{folder}, {count(len(files), 'file')}, {size(sum(path.stat().st_size for path in files))}"


PROFILE = Command(
    "profile",
    "measure this machine's GPU, so that others can plan for it",
    """Measure what the cost model knows of this machine's GPU: bandwidth, throughput, and what edges, forks and
launches cost. That takes seconds, and the GPU should have nothing else to do. With --out FILE.json, other machines can
plan for it: autostream schedule TARGET --device FILE.json
""",
    "profile --out my-gpu.json",
    [DEVICE, argument("--out", metavar="FILE.json", type=Path, help="write what --device FILE.json reads")],
    _profile,
)

_BUG_REPORT = argument(
    "--bug-report",
    dest="form",
    action="store_const",
    const="bug report",
    help="a report of a fault with all of that in it, to be filled in, in Markdown",
)

ENV = Command(
    "env",
    "say what is installed and set, for a report of a fault",
    """Say which versions, devices and settings there are here that a result depends on: what a report of a fault needs.
Of the environment, only variables of PyTorch, CUDA, OpenMP and autostream are shown.
""",
    "env --bug-report",
    [JSON, _BUG_REPORT, OUT],
    _env,
)
