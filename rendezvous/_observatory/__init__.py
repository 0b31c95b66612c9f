"""What a whole job does: built from what its ranks and hosts say, for the page, ``top``, the report and Prometheus.

Nothing here opens a socket.
"""
