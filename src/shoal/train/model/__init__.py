"""A model on the devices of a group: profile, cuts, stages and replicas."""
