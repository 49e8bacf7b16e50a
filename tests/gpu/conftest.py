"""What all tests on a GPU leave behind: nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory_goes_back() -> Iterator[None]:
    """The next test has the GPU for itself."""
    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
