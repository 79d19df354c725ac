"""`shmsync top`: a panel of one arena that is drawn again at each interval.

May be imported by cli.
"""
