"""What the tests share: worker processes, weights that tell their version, and what a test asks the kernel."""
