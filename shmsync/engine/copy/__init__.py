"""The plan by which a source is copied into a slot, and the cache that finds it again.

The native core carries a plan out; what it cannot read is converted first.
May be imported by engine.
"""
