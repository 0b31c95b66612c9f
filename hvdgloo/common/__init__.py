"""Names that Horovod's programs import from ``horovod.common``."""
