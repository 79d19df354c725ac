"""One publication to the workers of a machine, by each of the means that people use: a file for each family."""
