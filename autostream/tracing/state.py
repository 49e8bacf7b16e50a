"""The tensors and flags of a live model, as they are now.

A program takes parameters and buffers as arguments, so that whoever changes a weight, however they do it, changes what
the next call reads. Fetching them must not walk the module tree: the dictionaries that hold them are remembered, and
reading some hundred entries of remembered dictionaries takes some µs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from autostream.ir import Placeholder, Role

_training = operator.attrgetter("training")


class ModelWatch:
    """Tells, without walking the module tree, whether a model is still made of the same modules.

    Args:
        model: the module to watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        links = [(module._modules, name, child) for module in self.modules for name, child in module._modules.items()]
        self._parents = [parent for parent, _, _ in links]
        self._names = [name for _, name, _ in links]
        self._children = [child for _, _, child in links]
        self._child_dicts = [module._modules for module in self.modules]
        self._child_counts = list(map(len, self._child_dicts))
        self._hooks: list[Mapping[int, Any]] = [
            hooks for module in self.modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    def intact(self) -> bool:
        """Whether no submodule was added, removed or replaced since this object was made."""
        same = all(map(operator.is_, map(dict.get, self._parents, self._names), self._children))
        return same and list(map(len, self._child_dicts)) == self._child_counts

    def training(self) -> bytes:
        """The training flags of all modules, one byte each."""
        return bytes(map(_training, self.modules))

    def hooked(self) -> bool:
        """Whether a module has forward hooks, which a traced graph would not call."""
        return any(self._hooks) or bool(nn_module._global_forward_hooks) or bool(nn_module._global_forward_pre_hooks)


class LiveState:
    """The parameters, buffers and constants that a program's placeholders stand for.

    Args:
        model: the traced module.
        placeholders: those of the program; inputs are passed over.
        constants: values of the constants that no attribute of the model holds, by placeholder target.
    """

    def __init__(self, model: nn.Module, placeholders: Sequence[Placeholder], constants: dict[str, Tensor]) -> None:
        slots = [_slot(model, item, constants) for item in placeholders if item.role is not Role.INPUT]
        self._dicts = [holder for holder, _ in slots]
        self._keys = [key for _, key in slots]
        tensors = self.tensors()
        places = {id(tensor): index for index, tensor in enumerate(tensors)}
        # A tied weight has one placeholder and several names; when one of the names gets another tensor, it is untied.
        ties = [
            (holder, key, places[id(tensor)])
            for module in model.modules()
            for holder in (module._parameters, module._buffers)
            for key, tensor in holder.items()
            if id(tensor) in places
            and (holder is not self._dicts[places[id(tensor)]] or key != self._keys[places[id(tensor)]])
        ]
        self._tied_dicts: list[dict[str, Any]] = [holder for holder, _, _ in ties]
        self._tied_keys = [key for _, key, _ in ties]
        self._tied_places = [place for _, _, place in ties]

    def tensors(self) -> list[Tensor | None]:
        """The tensors in placeholder order, as the model holds them now; ``None`` for one that was removed."""
        return list(map(dict.get, self._dicts, self._keys))

    def tied(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether weights that were tied when the program was traced still are, among these tensors."""
        named = map(dict.get, self._tied_dicts, self._tied_keys)
        return all(map(operator.is_, named, map(tensors.__getitem__, self._tied_places)))


def _slot(model: nn.Module, placeholder: Placeholder, constants: dict[str, Tensor]) -> tuple[dict[str, Any], str]:
    """The dictionary that holds a placeholder's tensor, and its key there."""
    if placeholder.target in constants:
        return constants, placeholder.target
    path, _, name = placeholder.target.rpartition(".")
    owner = model.get_submodule(path)
    for holder in (owner._parameters, owner._buffers):
        if name in holder:
            return cast(dict[str, Any], holder), name
    return vars(owner), name
