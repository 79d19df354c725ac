"""The trainer's side of the TorchRL scheme: arenas of groups of workers, and one send at a time.

Needs an installed TorchRL.
May be imported by integrations/torchrl.
"""
