"""Spark support of TensorFlow's front-end: ``compute_worker``."""
