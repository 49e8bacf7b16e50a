"""What options require of the machine and of the model's device, and may not be had."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from autostream.errors import OptionError
from autostream.fusion.inductor import check_level, check_settings, runs_on_cpu
from autostream.options import Options


def check_requirements(options: Options, tensors: Iterable[Tensor] = ()) -> None:
    """Check that what options require is to be had. What they only allow (``"auto"``) need not be.

    Args:
        options: how to schedule a model.
        tensors: the model's tensors, on the devices on which it runs.

    Raises:
        OptionError: Inductor has no setting of such a name, no kernels for this machine, or there is no GPU to capture
            a CUDA graph on.

    Example:
        >>> import torch
        >>> check_requirements(Options(cuda_graph=True), [torch.ones(1)])
        Traceback (most recent call last):
        ...
        autostream.errors.OptionError: cuda_graph=True is not to be had: this program runs on the CPU: use "auto"
    """
    tensors = list(tensors)
    check_settings(options.inductor_options)
    check_level(options.kernels, tensors)
    if options.cuda_graph is True and runs_on_cpu(tensors):
        raise OptionError('cuda_graph=True is not to be had: this program runs on the CPU: use "auto"')
