"""What Horovod's faces have in common, by the names of the modules that it has in Horovod."""
