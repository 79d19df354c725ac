"""One version is written: a slot is found, filled, committed, and acked by the workers.

publishing.py has the order of these steps, writing.py the steps, update.py the section that users write in.
May be imported by engine.
"""
