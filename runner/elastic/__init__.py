"""The changing hosts of elastic jobs: discoveries that list them, and the driver that uses the lists."""
