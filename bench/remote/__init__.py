"""Sends over Ray, RPC and torch.distributed: one cell of the table, and the contestants of each engine."""
