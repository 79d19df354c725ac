"""Modules whose parameters are views of the arena, and whose calls are read sections.

binding.py swaps the tensors, guarded_methods.py finds the calls, guard.py wraps them.
May be imported by engine, schemes and integrations.
"""
