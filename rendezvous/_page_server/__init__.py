"""The HTTP server of a job's page: its sockets and threads, and the gate that lets only its visitors in."""
