"""One synchronous send to the workers of one machine: the contest, shmsync's side of it, and deaths during a send."""
