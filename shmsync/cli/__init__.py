"""The command line: `shmsync list`, `inspect`, `top`, `doctor`, `export`, `publish`, `gc`, `demo`.

program.py has them all. What they show of an arena comes from memory/inspection.py.
All but `export`, `publish` and `demo` do without torch; tests/programs/test_light_imports.py lists what they import.
May be imported by __main__.
"""

from .program import main

__all__ = ["main"]
