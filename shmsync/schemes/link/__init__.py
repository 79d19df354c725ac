"""The connections between a trainer and its workers, both ends: messages, their answers, and the locks around a send.

May be imported by schemes, workers, collectors and integrations.
"""
