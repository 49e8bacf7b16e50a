"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no clocks", deadline=None)
settings.load_profile("no clocks")
