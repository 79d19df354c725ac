"""The README for places outside the repository, such as a package index: links to its files become addresses.

scikit-build-core calls dynamic_metadata() when it builds; pyproject.toml has the repository's address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOME = re.compile(r'^Homepage = "(.+)"$', re.MULTILINE)
LINK = re.compile(r"(!\[[^\]]*)?\]\((?![a-z]+:|#)([^)]+)\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def absolute(text: str, home: str) -> str:
    """The text, in which every link that is relative to the repository leads to its main branch; code stays."""

    def elsewhere(link: re.Match[str]) -> str:
        picture, path = link.groups()  # a picture's address is that of the file, not of a page about it
        return f"{picture or ''}]({home}/{'raw' if picture else 'blob'}/main/{path})"

    parts = CODE.split(text)
    # A link's own words may be code: then its `](` stands at the start of the part after it.
    return "".join(part if i % 2 else LINK.sub(elsewhere, part) for i, part in enumerate(parts))


def dynamic_metadata(field: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """What scikit-build-core asks for: the text of the field."""
    if field != "readme" or settings:
        raise RuntimeError(f"this makes the field readme, without settings, not {field} with {dict(settings)}")
    home = HOME.search(Path("pyproject.toml").read_text())
    assert home is not None
    return {"content-type": "text/markdown", "text": absolute(Path("README.md").read_text(), home[1])}
