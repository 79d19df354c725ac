"""A collector's worker process: environments, the policy, and the buffers that it writes.

May be imported by collectors.
"""
