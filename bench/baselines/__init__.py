"""Baselines for a send of shmsync's schemes."""
