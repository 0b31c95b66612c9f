"""In the launcher: one state per host, from starting its agent to knowing that nothing is left of the job."""
