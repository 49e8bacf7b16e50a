from __future__ import annotations

import logging
from pathlib import Path

import torch

from autostream.analysis.source import user_line

TORCH = Path(torch.__file__).parent / "nn" / "modules" / "linear.py"


def test_the_innermost_frame_of_the_user() -> None:
    trace = f"""
  File "/models/net.py", line 7, in forward
    return self.head(x)
  File "/models/head.py", line 12, in forward
    y = self.proj(x)
        ^^^^^^^^^^^^
  File "{TORCH}", line 134, in forward
    return F.linear(input, self.weight, self.bias)
  File "<eval_with_key>.5", line 9, in forward
    cond = None
"""
    assert user_line(trace) == "/models/head.py:12: y = self.proj(x)"
    assert user_line(f'File "{Path.cwd()}/src/a.py", line 3, in f\n    x = 1') == "src/a.py:3: x = 1"
    assert user_line('File "/a.py", line 1, in f\n  File "/b.py", line 2, in g\n') == "/b.py:2"
    library = f'File "{logging.__file__}", line 1, in info\n    x\n'
    assert user_line('File "/a.py", line 1, in f\n    log(x)\n' + library) == "/a.py:1: log(x)"
    assert user_line(None) == user_line("") == user_line(f'File "{TORCH}", line 1, in f\n    x') == ""
