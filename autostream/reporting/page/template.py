"""The files that pages are made of."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files


def filled(name: str, parts: Mapping[str, str]) -> str:
    """A file with parts in place of their names in double braces. Inserted text is not substituted again."""
    return re.sub(r"\{\{([\w-]+)\}\}", lambda found: parts[found[1]], text_of(name))


def text_of(name: str) -> str:
    """A file of this folder."""
    return (files(__package__) / name).read_text(encoding="utf-8")


def hash_of(text: str) -> str:
    """The hash of a style or a script by which a content security policy allows it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
