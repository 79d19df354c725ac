"""The command line: `shmsync list`, `inspect`, `top`, `doctor`, `export`, `publish`, `gc`, `demo`.

program.py has the arguments of all. What they show of an arena comes from memory/inspection.py.
All but `export`, `publish`, `demo` and `inspect --digest` do without torch, which takes seconds to import.
May be imported by __main__.
"""

from .program import main

__all__ = ["main"]
