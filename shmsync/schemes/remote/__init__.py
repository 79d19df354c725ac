"""Schemes for workers beyond this machine, over Ray, torch RPC and torch.distributed. No network of our own.

base.py, packing.py and receiver.py are what they share; nodes.py is fan_out="node". A module here imports its engine
when it is first used.
May be imported by schemes/__init__ alone.
"""
