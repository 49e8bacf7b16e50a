"""What the site has beside docs/: README, ARCHITECTURE and results stay where readers of the repository look for them.

Their links are those of the repository; here they are made those of the site.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {"index.md": "README.md", **{name: name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")}}
"""Pages of the site, and where they lie in the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages and results from outside of docs/."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=_of_the_site((ROOT / source).read_text(encoding="utf-8"))))
    results = ROOT / "benchmarks" / "results"
    for path in sorted([*results.rglob("*.md"), *results.rglob("*.svg"), *results.rglob("*.json")]):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to where the site has their targets."""
    inside = re.sub(r"\]\(\.\./(benchmarks/results/|ARCHITECTURE|CHANGELOG|CONTRIBUTING)", r"](\1", markdown)
    return _without_sources(inside)


def _of_the_site(markdown: str) -> str:
    """The text of a file at the root of the repository, with links as the site has them."""
    return _without_sources(re.sub(r"\]\(docs/", "](", markdown))


def _without_sources(markdown: str) -> str:
    """Text without links to source files, which are no pages."""
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)?(?:benchmarks|autostream|examples)/[^)]*\.py\)", r"\1", markdown)
