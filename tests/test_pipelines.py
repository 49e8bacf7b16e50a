"""The example of a split model, which ``torch.distributed.pipelining`` runs in two processes, over gloo."""

from __future__ import annotations

import io
import os
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import torch.distributed as dist

from tests.distributed.processes import outcomes

EXAMPLE = Path(__file__).parent.parent / "examples" / "pipeline.py"


def example(rank: int, processes: int, group: dist.ProcessGroup) -> None:
    """Run it as ``torchrun`` would."""
    port = [0]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port, group=group)
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0]), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    if rank == processes - 1:
        text = printed.getvalue()
        assert re.search(r"^A step by 1F1B takes [\d,.]+ µs\.", text, re.MULTILINE), text
        assert re.search(r"^measured  [\d,.]+ µs, loss \d\.\d{4}$", text, re.MULTILINE), text


def test_the_example_prints_the_predicted_and_the_measured_time_of_a_step() -> None:
    assert "torchrun --nproc-per-node 2 examples/pipeline.py" in EXAMPLE.read_text()
    assert outcomes({"example": example}, 2) == {"example": ["", ""]}
