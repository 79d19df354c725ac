"""A hook of mkdocs: makes the pages that are no files of docs/, so that every link of the repository leads somewhere.

README, CHANGELOG and CONTRIBUTING become pages. Sources that a page links to become pages that show them. The reference
has an entry for each public name. Decisions get their places in the navigation, in the order of their numbers.
"""

from __future__ import annotations

import ast
import importlib.util
import posixpath
import re
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TOP = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".hpp": "cpp", ".cpp": "cpp", ".pml": "c", ".sh": "bash", ".toml": "toml"}
REFERENCE = {
    "engine": ("The engine", ["shmsync"]),
    "schemes": ("Schemes", ["shmsync.schemes"]),
    "collectors": (
        "Collectors, metrics and TorchRL",
        ["shmsync.collectors", "shmsync.metrics", "shmsync.integrations.torchrl"],
    ),
    "errors": ("Errors", ["shmsync.errors"]),
}


@event_priority(100)  # before mkdocstrings, which reads its paths there
def on_config(config):
    """Put the decisions into the navigation, and let the reference read the installed package: it has the stubs.

    The repository's address is that of pyproject.toml.
    """
    config.repo_url = re.search(r'^Homepage = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    installed = Path(importlib.util.find_spec("shmsync").origin).parents[1]
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(installed)]
    decisions = sorted(each.name for each in (ROOT / "docs/adr").glob("*.md"))
    for part in config.nav:
        for pages in part.values():
            for page in pages:
                if isinstance(page, dict) and "Decisions" in page:
                    page["Decisions"] = [f"adr/{name}" for name in decisions]
    return config


def on_files(files, config):
    """Add the pages that are made here."""
    made = {}
    for name, target in TOP.items():
        made[target] = (ROOT / name).read_text()
    for name, (title, modules) in REFERENCE.items():
        made[f"reference/{name}.md"] = reference(title, modules)
    seen = {file.src_uri: Path(file.abs_src_path).read_text() for file in files.documentation_pages()} | made
    repository = {posixpath.join("docs", uri): uri for uri in seen if uri not in TOP.values()}
    repository |= TOP
    waiting = list(repository.items())
    while waiting:
        where, uri = waiting.pop()
        text = made.get(uri) or seen.get(uri) or ""
        for path in targets(text, where):
            if path not in repository and (ROOT / path).exists() and not path.startswith("docs"):
                repository[path] = page = page_of(path)
                made[page] = shown(path)
                if page != f"source/{path}.md":  # a text, or a list of files: it has links
                    waiting.append((path, page))
    config.extra["repository"] = repository
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return Files(list(files))


def on_page_markdown(markdown, page, config, files):
    """Let links lead to pages."""
    repository = config.extra["repository"]
    where = next((path for path, uri in repository.items() if uri == page.file.src_uri), None)
    if where is None:
        return markdown

    def lead(match):
        before, target, after = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(where), target))
        uri = repository.get(path)
        if uri is None and path == "docs/adr":
            uri = next(each for each in repository.values() if each.startswith("adr/"))
        if uri is None and path.startswith("docs/"):
            uri = path.removeprefix("docs/")
        if uri is None:
            return match[0]
        return before + posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".") + after

    parts = CODE.split(markdown)
    return "".join(part if index % 2 else LINK.sub(lead, part) for index, part in enumerate(parts))


def targets(text, where):
    """What the links of a page at that place of the repository lead to there."""
    for index, part in enumerate(CODE.split(text)):
        for _, target, _ in () if index % 2 else LINK.findall(part):
            if "://" not in target:
                yield posixpath.normpath(posixpath.join(posixpath.dirname(where), target))


def page_of(path):
    """Where the site has a file or folder of the repository."""
    if (ROOT / path).is_dir():
        return f"source/{path}/files.md"
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def shown(path):
    """A page that shows a file, or the files of a folder."""
    if (ROOT / path).is_dir():
        names = sorted(each.name for each in (ROOT / path).iterdir() if each.is_file() and each.name[0] not in "._")
        return "\n".join([f"# {path}", "", *(f"- [{name}]({posixpath.basename(path)}/{name})" for name in names), ""])
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"


def reference(title, modules):
    """A page with an entry for each public name of these modules."""
    lines = [f"# {title}", ""]
    for module in modules:
        names = public_names(module)
        lines += [f"## {module}", ""] if len(modules) > 1 else []
        for name in names:
            lines += [f"::: {module}.{name}", f"    options: {{heading_level: {3 if len(modules) > 1 else 2}}}", ""]
            lines += [f"[What to do](../troubleshooting.md#{name.lower()})", ""] if module == "shmsync.errors" else []
    return "\n".join(lines)


def public_names(module):
    """What a module exports, as its source says; errors have their own page."""
    path = ROOT / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if getattr(target, "id", "") == "__all__":
                names = [constant.value for constant in ast.walk(node.value) if isinstance(constant, ast.Constant)]
                break
    else:
        names = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    names = [name for name in names if isinstance(name, str) and not name.startswith("_")]
    if module == "shmsync":
        errors = public_names("shmsync.errors")
        schemes = public_names("shmsync.schemes")
        names = [name for name in names if name not in errors and name not in schemes]
    return names
