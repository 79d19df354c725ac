"""What a send of shmsync's schemes is compared with."""
