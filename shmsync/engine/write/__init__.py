"""One version is written: a slot is found, filled, committed, and acked by the workers.

writer.py has the steps in their order, copy_plan.py how a source gets into a slot, slot_writer.py how the slot is got,
acks.py the wait for workers, adoption.py the module that is the slab, optimizer_steps.py its steps.
May be imported by engine, schemes, workers and integrations.
"""
