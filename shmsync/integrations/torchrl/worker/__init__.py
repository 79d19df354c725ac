"""The worker's side of the TorchRL scheme: a policy that moves with its arena between two forwards.

Needs an installed TorchRL.
May be imported by integrations/torchrl.
"""
