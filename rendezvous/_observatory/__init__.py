"""What a whole job does: built from what its ranks and hosts say, and read by the page, ``top``, the report and
Prometheus. Nothing here opens a socket.
"""
