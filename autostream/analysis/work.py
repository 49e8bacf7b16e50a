"""How much arithmetic and memory traffic one node stands for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves, tree_map

from autostream.analysis.effects import effects_of, wrapped_graph
from autostream.analysis.values import base_name, concrete, tensors_given, tensors_in, value_of
