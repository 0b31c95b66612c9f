"""Ways to start an agent on a host: as a local process, or by ssh, srun or any command."""
