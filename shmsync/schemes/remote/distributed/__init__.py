"""Weights for the ranks of torch.distributed.

A connection to each rank announces and answers. A process group of gloo moves the bytes to other machines; a rank on
the trainer's machine maps them.
May be imported by schemes/remote/__init__ alone.
"""
