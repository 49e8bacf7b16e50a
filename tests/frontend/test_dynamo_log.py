"""PyTorch's tracebacks stay out of the logs where whoever traces has the error."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import nn

import autostream
from autostream.frontend.dynamo_log import overheard

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def fail(name: str) -> None:
    try:
        raise ValueError("no way\nand so on")
    except ValueError:
        logging.getLogger(name).exception("it failed")


def test_why_dynamo_leaves_something_alone_is_heard_and_not_written(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    with overheard(heard.append):
        fail("torch._dynamo.convert_frame")
        fail("torch._subclasses.fake_tensor")
        logging.getLogger("torch._dynamo.convert_frame").warning("no error")
    assert heard == ["ValueError: no way"]
    assert caplog.messages == ["no error"]
    fail("torch._dynamo.convert_frame")
    assert caplog.messages == ["no error", "it failed"]


def test_other_threads_write_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    with overheard(heard.append):
        other = threading.Thread(target=fail, args=("torch._dynamo.convert_frame",))
        other.start()
        other.join()
    assert (heard, caplog.messages) == ([], ["it failed"])


def test_inputs_of_a_wrong_shape_raise_the_models_own_error_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch.no_grad():
        autostream.optimize(nn.Linear(3, 4))(torch.ones(2, 5))
    assert not [record for record in caplog.records if record.exc_info]
