"""How an agent is started on a host: as a local process, or by ssh, srun or any command."""
