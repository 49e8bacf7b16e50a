"""An op that expects a value, so that a program is one way through a model that chooses its ops by values.

    y = x / 2 if x.mean() > 0 else -x        mean ── gt ── expect(gt, 0, True) ── div

It is a guard of a trace: what was recorded after a branch is right as long as the branch goes as it did (Gal et al.,
*Trace-based Just-in-Time Type Specialization for Dynamic Languages*, PLDI 2009). No op of a program that comes after an
``expect`` may run before it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OtherWay(Exception):  # noqa: N818 - a notice between modules, not an error
    """A value is not what a program expects of it: the call goes another way, and nothing shows of this one.

    Attributes:
        at: which of the values that were asked for it is, in order.
        outcome: whether it is true.
    """

    def __init__(self, at: int, outcome: bool) -> None:
        super().__init__(f"value {at} is {outcome}")
        self.at, self.outcome = at, outcome


def _expect(value: Tensor, at: int, outcome: bool) -> None:
    """Wait for a value, and see that it is as expected.

    Raises:
        OtherWay: it is not.
    """
    if bool(value) is not outcome:
        raise OtherWay(at, not outcome)


def _declared() -> torch.library.Library:
    """``autostream::expect``. It returns nothing, and is there for its effect: what removes unused nodes keeps it."""
    library = torch.library.Library("autostream", "DEF")  # type: ignore[no-untyped-call]
    library.define("expect(Tensor value, int at, bool outcome) -> ()")  # type: ignore[no-untyped-call]
    library.impl("expect", _expect, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("autostream::expect", lambda value, at, outcome: None, lib=library)
    torch.fx.has_side_effect(torch.ops.autostream.expect.default)
    return library


_LIBRARY = _declared()
"""Held: the op goes with it."""

expect = torch.ops.autostream.expect.default
"""Takes a tensor of one element, which of the values it is that were asked for, and whether it should be true."""
