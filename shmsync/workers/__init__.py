"""Worker processes of one publisher: started with it, watched while it publishes, ended before it closes.

pool.py has the trainer's side, rank_process.py what runs in a worker.
May be imported by collectors and cli.
"""

from .pool import Workers

__all__ = ["Workers"]
