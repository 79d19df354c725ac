"""shmsync inside other libraries. Each folder needs the extra of its name; importing shmsync imports none of them."""
