"""The scheme for TorchRL in TorchRL's own collectors: the contest, its trainers, policies and reports."""
