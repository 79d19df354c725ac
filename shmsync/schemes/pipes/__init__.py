"""The schemes on one machine: each worker is reached over one end of a multiprocessing.Pipe.

Weights go through the pipe (multiprocess), or lie in shared memory and the pipe carries small messages about them.
May be imported by schemes/__init__ alone.
"""
