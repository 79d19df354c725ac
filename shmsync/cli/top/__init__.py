"""`shmsync top`: a panel of all arenas or of one, drawn again at each interval.

May be imported by cli.
"""
