"""Every relative link of every page leads to a file, and every heading it names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md", "recipes/**/*.md")
    for page in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


def test_pages_were_found() -> None:
    assert len(PAGES) > 20
    assert sum(len(LINK.findall(page.read_text())) for page in PAGES) > 40
