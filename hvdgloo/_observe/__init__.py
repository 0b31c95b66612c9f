"""What a rank measures about itself, and how that is handed on once a second."""
