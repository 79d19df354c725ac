"""What all benchmarks use: timing, models, the time of a section, rows, and their tables in the documentation."""
