"""Models of torchvision and timm by name, with random weights, for commands and benchmarks."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autostream.errors import TargetError

SEED = 0
"""Weights and inputs are the same in every process, so that two runs can be compared."""

IMAGE = (1, 3, 224, 224)
CLIP = (1, 3, 16, 224, 224)
"""Shapes of one image, and of sixteen frames."""

_OWN_INIT = ("googlenet", "inception_v3")


def build(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Make the torchvision or timm model of this name, in eval mode, and inputs that it takes; both on the CPU.

    Weights are random, from a fixed seed, and batch norms calibrated so that activations stay within the range of
    fp16; nothing is downloaded and the global random state stays as it was. Inputs
    are random too: one image of 1x3x224x224 (299 for Inception-v3, for timm models the size in their configuration),
    sixteen frames for video models, two images for optical flow, a list of images for detection. torchvision takes
    precedence for a name that both libraries have.

    Raises:
        TargetError: no model has this name, or torchvision or timm is not installed.

    Example:
        >>> model, (image,) = build("squeezenet1_1")
        >>> model.training, tuple(image.shape), tuple(model(image).shape)
        (False, (1, 3, 224, 224), (1, 1000))
    """
    model, args = uncalibrated(name)
    # Detectors need compiled ops, which may be missing; their norms are frozen and need no calibration.
    runs = isinstance(args[0], Tensor) and not args[0].is_meta
    return (calibrated(model, args) if runs else model), args


def uncalibrated(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The same without calibration, which runs the model: enough for a plan, which needs shapes only.

    Raises:
        TargetError: as :func:`build`.

    Example:
        >>> model, (image,) = uncalibrated("squeezenet1_1")
        >>> model.training, tuple(image.shape)
        (False, (1, 3, 224, 224))
    """
    torchvision = _import("torchvision", name)
    known = torchvision.models.list_models()
    timm = None if name in known else _import("timm", name)  # slow to import
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        if timm is None:
            model, args = _torchvision_model(torchvision.models, name), _torchvision_inputs(torchvision.models, name)
        elif timm.is_model(name):
            model = timm.create_model(name, pretrained=False)
            args = (torch.randn(1, *model.pretrained_cfg["input_size"]),)
        else:
            raise _unknown(name, [*known, *timm.list_models()])
        model.eval()
        if torch.get_default_device().type == "meta":
            return model, args
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and not layer.weight.any():
                layer.reset_parameters()  # a last layer of zeros would make all outputs equal
    return model, args


def calibrated(model: nn.Module, samples: tuple[Any, ...]) -> nn.Module:
    """Set the variance of batch norms, also frozen ones, to the mean square of their inputs for these samples.

    With random weights and no statistics, activations vanish or overflow in fp16. Means stay zero: subtracting them in
    each layer of a deep net would leave rounding errors only.

    Args:
        model: in eval mode, in float32; it is changed.
        samples: its arguments.
    """
    norms = [module for module in model.modules() if isinstance(getattr(module, "running_mean", None), Tensor)]
    if norms:
        hooks = [norm.register_forward_pre_hook(_observe) for norm in norms]
        with torch.no_grad():
            model(*samples)
        for hook in hooks:
            hook.remove()
    return model


def _observe(norm: Any, inputs: tuple[Any, ...]) -> None:
    (x,) = inputs
    norm.running_mean.zero_()
    norm.running_var.copy_(x.square().mean([dim for dim in range(x.dim()) if dim != 1]))


def _torchvision_model(models: ModuleType, name: str) -> nn.Module:
    """A model with random weights, also in its backbone: by default builders download them."""
    accepted = inspect.signature(models.get_model_builder(name)).parameters
    backbone = {"weights_backbone": None} if "weights_backbone" in accepted else {}
    if name.removeprefix("quantized_") not in _OWN_INIT:
        return models.get_model(name, weights=None, **backbone)  # type: ignore[no-any-return]
    # The default initialization of these two is slow, and so small that errors in early layers would not show.
    # Auxiliary classifiers are for training only.
    model: nn.Module = models.get_model(name, weights=None, aux_logits=False, init_weights=False)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def _torchvision_inputs(models: ModuleType, name: str) -> tuple[Any, ...]:
    if name in models.list_models(module=models.video):
        return (torch.randn(CLIP),)
    if name in models.list_models(module=models.optical_flow):
        return (torch.randn(IMAGE), torch.randn(IMAGE))
    if name in models.list_models(module=models.detection):
        return ([torch.rand(IMAGE[1:])],)
    return (_image(299 if name.endswith("inception_v3") else 224),)


def _image(size: int) -> Tensor:
    return torch.randn(*IMAGE[:2], size, size)


def _import(library: str, name: str) -> ModuleType:
    try:
        return import_without_compiled_ops(library)
    except ModuleNotFoundError as error:
        raise TargetError(
            f"the zoo model {name!r} needs {error.name}, which is not installed: "
            'pip install "autostream[zoo]", or write package.module:factory or file.py:factory'
        ) from error


def import_without_compiled_ops(library: str) -> ModuleType:
    """Import torchvision, or a library that imports it, also where its compiled ops cannot be loaded.

    torchvision's wheel on PyPI is linked to a CUDA torch. With a CPU torch its shared object does not load, and the
    import fails because two ops are not declared. Declaring them is enough for models that do not run them.
    """
    try:
        return importlib.import_module(library)
    except RuntimeError as error:
        if torch.version.cuda is not None or "torchvision::nms does not exist" not in str(error):
            raise
        _declare_missing_ops()
        return importlib.import_module(library)


@functools.cache
def _declare_missing_ops() -> torch.library.Library:
    # Declarations live as long as this object, which the cache keeps alive.
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for op in ("nms", "qnms"):
        library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return library


def _unknown(name: str, known: Sequence[str]) -> TargetError:
    near = difflib.get_close_matches(name, known, n=3)
    hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    return TargetError(
        f"there is no zoo model {name!r}{hint}: write a name from torchvision.models.list_models() or "
        "timm.list_models(), or package.module:factory, or file.py:factory"
    )
