"""What combinations, tiles and whole layers take on this machine, and what the machine allows."""
