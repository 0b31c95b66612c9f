"""What TensorFlow's part of hvdgloo has for Spark: ``compute_worker``."""
