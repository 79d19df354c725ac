"""The trainer's connections to its workers: messages, their answers, and the locks around a send.

May be imported by schemes, workers, collectors and integrations.
"""
