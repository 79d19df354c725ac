"""The plan by which a source is copied into a slot, and how it is found again.

The native core carries a plan out; converting.py writes what it cannot read.
May be imported by engine.
"""
