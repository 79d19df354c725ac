"""Weights for workers of torch.distributed.rpc.

May be imported by schemes/remote/__init__ alone.
"""
