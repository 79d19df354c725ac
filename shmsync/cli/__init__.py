"""The command line: `shmsync list`, `inspect`, `top`, `doctor`, `export`, `gc`, `demo`.

One file for each command; program.py has them all. What they show of an arena comes from memory/inspection.py.
May be imported by __main__.
"""

from .program import main

__all__ = ["main"]
