"""The arenas of a scheme: publishers by model and group, subscriptions by model.

May be imported by schemes, collectors and integrations.
"""
