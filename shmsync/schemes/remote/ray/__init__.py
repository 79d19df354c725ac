"""Weights for actors of Ray.

Ray is imported when one of these is first used.
May be imported by schemes/remote/__init__ alone.
"""
