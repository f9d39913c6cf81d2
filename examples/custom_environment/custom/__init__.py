"""The classes that a user of VERL writes: a data set of states, and a reward manager."""
