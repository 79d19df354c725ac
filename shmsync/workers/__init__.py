"""Worker processes of one publisher: started with it, watched while it publishes, ended before it closes.

process.py has one process as its trainer sees it, worker_process.py what runs in it, pool.py the Workers.
May be imported by schemes, collectors and cli.
"""

from .pool import Workers

__all__ = ["Workers"]
