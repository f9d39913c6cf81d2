"""What a user of VERL writes: a data set of an environment's states, and their rewards."""
