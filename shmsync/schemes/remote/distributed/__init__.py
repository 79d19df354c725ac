"""Weights for the ranks of torch.distributed.

A connection to each rank announces and answers, and a process group of gloo moves the bytes.
May be imported by schemes/remote/__init__ alone.
"""
