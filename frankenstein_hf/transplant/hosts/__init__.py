"""The families that can be imported, one file each: a new one needs no edit anywhere else."""
