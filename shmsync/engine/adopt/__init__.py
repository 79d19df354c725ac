"""The trainer's module as the slab itself: its parameters, its optimizers and its load_state_dict().

adopting.py follows its tensors by name, adopted_buffers.py copies its buffers; steps and loads run inside
update() (engine/write/update.py).
May be imported by engine.
"""
